"""What TraceLab has published about Codex sessions, and the same figures of any rounds.

Source: tracelab.cs.washington.edu and uw-syfi/TraceLab@0b8a262 (artifacts/*/README.md, *.tex), release v0.0.1:
216,823 Codex rounds of 1,589 sessions. CC BY 4.0, TraceLab (SyFI Lab, University of Washington). Aggregates only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eval.quantile import quantile
from eval.workloads.tracelab import Round

PREFIX_BIN_EDGES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000)
"""Tokens; what TraceLab calls "<1k", "1-2k" and so on, the last bin is from 256K."""

PUBLISHED_BIN_ROUNDS = (626, 90, 2108, 3501, 5503, 10470, 29925, 72996, 91598, 6)
"""Rounds by cached prefix."""

COMPACTED_TO = 0.5
"""A round that has less than this share of the prompt before it counts as a compaction in `aggregates`."""


@dataclass(frozen=True)
class Aggregates:
    """Tokens, shares and seconds. `hit`: cached over all prompt tokens; by what the round answers to.

    `human_wait_*` are pauses before rounds that a user began.
    """

    prefix_p50: float
    prefix_p99: float
    append_p50: float
    output_p50: float
    hit: float
    hit_user: float
    hit_tool: float
    shrinking: float
    sessions_with_compaction: float
    human_wait_p50_s: float
    waits_under_5min: float
    waits_under_1h: float
    tool_wait_p50_s: float
    tool_wait_p90_s: float
    generation_p50_s: float


PUBLISHED = Aggregates(
    prefix_p50=116_000,
    prefix_p99=231_000,
    append_p50=886,
    output_p50=184,
    hit=0.957,
    hit_user=0.782,
    hit_tool=0.972,
    shrinking=0.0343,
    sessions_with_compaction=0.184,
    human_wait_p50_s=95,
    waits_under_5min=0.698,
    waits_under_1h=0.949,
    tool_wait_p50_s=0.3,  # the last three: Codex and Claude Code together
    tool_wait_p90_s=13.6,
    generation_p50_s=5.7,
)


def aggregates(sessions: Sequence[tuple[Sequence[Round], Sequence[bool]]]) -> Aggregates:
    """Return the figures of sessions, each its rounds in order and which of them a user began.

    Raises:
        ValueError: there are too few rounds to have them: a kind of round never comes.
    """
    rounds = [(one, user) for group, users in sessions for one, user in zip(group, users, strict=True)]
    pairs = [
        (before, one, user)
        for group, users in sessions
        for (before, one), user in zip(pairwise(group), users[1:], strict=True)
    ]
    human = [one.at_s - before.at_s - before.service_s for before, one, user in pairs if user]
    tools = [one.at_s - before.at_s - before.service_s for before, one, user in pairs if not user]
    if not human or not tools:
        raise ValueError("rounds after a user's message and after a tool's result are both needed")
    compacting = sum(any(_compacts(*two) for two in pairwise(group)) for group, _ in sessions)
    return Aggregates(
        prefix_p50=quantile([one.prefix_tokens for one, _ in rounds], 0.5),
        prefix_p99=quantile([one.prefix_tokens for one, _ in rounds], 0.99),
        append_p50=quantile([one.input_tokens - one.prefix_tokens for one, _ in rounds], 0.5),
        output_p50=quantile([one.output_tokens for one, _ in rounds], 0.5),
        hit=_hit([one for one, _ in rounds]),
        hit_user=_hit([one for one, user in rounds if user]),
        hit_tool=_hit([one for one, user in rounds if not user]),
        shrinking=sum(one.input_tokens < before.input_tokens for before, one, _ in pairs) / len(pairs),
        sessions_with_compaction=compacting / len(sessions),
        human_wait_p50_s=quantile(human, 0.5),
        waits_under_5min=sum(wait < 300 for wait in human) / len(human),
        waits_under_1h=sum(wait < 3600 for wait in human) / len(human),
        tool_wait_p50_s=quantile(tools, 0.5),
        tool_wait_p90_s=quantile(tools, 0.9),
        generation_p50_s=quantile([one.service_s for one, _ in rounds], 0.5),
    )


def rounds_by_prefix(rounds: Sequence[Round]) -> list[list[int]]:
    """Return the appended tokens of the rounds in each bin of `PREFIX_BIN_EDGES`."""
    found: list[list[int]] = [[] for _ in range(len(PREFIX_BIN_EDGES) + 1)]
    for one in rounds:
        found[bisect_right(PREFIX_BIN_EDGES, one.prefix_tokens)].append(one.input_tokens - one.prefix_tokens)
    return found


def _compacts(before: Round, one: Round) -> bool:
    return one.input_tokens < COMPACTED_TO * before.input_tokens


def _hit(rounds: Sequence[Round]) -> float:
    return sum(one.prefix_tokens for one in rounds) / sum(one.input_tokens for one in rounds)
