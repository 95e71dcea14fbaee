"""Codex sessions made up so that they have the aggregates that TraceLab published (`codex_stats`).

For those who have not downloaded the data set itself. A session grows by answers and tool results, round by round:

- When a user speaks again the reasoning of the rounds since the user's last message is dropped, in `DROPS` of the
  cases. The prompt then parts from the one before right after that last message: a rewrite in the middle of the
  text. In the nine public Codex rounds the cache has what the last user's prompt had, in whole 128s (9,216 of 9,324,
  10,368 of 10,436), both times that a user speaks again.
- A prompt beyond the session's limit is summed up: little but the instructions stays.
- In `MISSES` of the rounds the provider's cache finds no more than the instructions although the text is the same.

How much of the published misses is which is not known: `DROPS` and `MISSES` are chosen so that the hit rates after
users and after tools come out. The two readings of `eval.workloads.tracelab` apply to these rounds as to real ones.
Rounds a session are the quantiles of one distribution, shuffled, so that small workloads come out alike too. Published
are the figures of all sessions, of 136 rounds on average; with 70 as here the median prefix stays about 12 % below.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from eval.workloads.sessions import Session
from eval.workloads.tracelab import Reading, Round, sessions_of

SESSIONS, REQUESTS = 68, 4791
"""As many as HiState's evaluation took of TraceLab; which ones is not known."""

_CACHE_STEP = 128  # the provider caches whole 128s
_ROUNDS_SIGMA = 1.05  # of the lengths of sessions
_USER_SHARE = 0.079  # of rounds: makes the published hit rates after users and tools give the one of all
_INSTRUCTIONS = (6_912, 3_456)  # cached prefixes of the public rounds that no earlier round explains
_START = (9_500, 0.35)  # median and sigma of a session's first prompt
_OUTPUT = (184, 1.25)
_REASONING = (0.2, 0.7)  # least and most share of an answer
_TOOL_RESULT = (
    # (up to this prompt, median, sigma): published appends are longer while a session is short.
    (32_000, 2_600, 1.5),
    (64_000, 1_100, 1.5),
    (math.inf, 310, 1.65),
)
_USER_TEXT = (120, 1.3)
_LIMIT = (190_000, 250_000)
_SUMMARY = (45_000, 0.6)
_HUMAN_WAIT_S = (95, 2.216)
_TOOL_WAIT_S = (0.3, 2.95)
_FIRST_TOKEN_S = (3.1, 0.5)
_TOKENS_PER_S = 61.3
DROPS = 0.5
MISSES = {"user": 0.13, "tool": 0.008}


@dataclass(frozen=True)
class CodexSession:
    """A session's rounds in order; `users[i]`: a user began round i, else a tool's result did."""

    rounds: tuple[Round, ...]
    users: tuple[bool, ...]


def codex_workload(
    reading: Reading = Reading.GROWTH,
    sessions: int = SESSIONS,
    requests: int = REQUESTS,
    seed: int = 0,
    block_tokens: int = 64,
) -> list[Session]:
    """Return sessions in the harness's form; errors as in `codex_sessions`."""
    made = codex_sessions(sessions, requests, seed)
    return sessions_of((one for session in made for one in session.rounds), reading, block_tokens)


def codex_sessions(sessions: int = SESSIONS, requests: int = REQUESTS, seed: int = 0) -> list[CodexSession]:
    """Return exactly so many sessions with so many rounds in all. Equal arguments give equal sessions.

    Raises:
        ValueError: less than one session, or less requests than sessions.
    """
    if sessions < 1 or requests < sessions:
        raise ValueError(f"{requests} requests are not enough for {sessions} sessions: one each is the least")
    lengths = _lengths(sessions, requests, random.Random(f"{seed}/lengths"))
    return [_session(f"codex:{number:04d}", length, seed, number) for number, length in enumerate(lengths)]


def _lengths(sessions: int, requests: int, draw: random.Random) -> list[int]:
    """Return how many rounds each session has."""
    normal = NormalDist(0, _ROUNDS_SIGMA)
    weights = [math.exp(normal.inv_cdf((place + 0.5) / sessions)) for place in range(sessions)]
    left, found = requests - sessions, []
    for place, weight in enumerate(weights):  # what is left is shared out anew each time: no rounding remains
        extra = round(left * weight / sum(weights[place:]))
        found.append(1 + extra)
        left -= extra
    draw.shuffle(found)
    return found


def _session(name: str, length: int, seed: int, number: int) -> CodexSession:
    draw = random.Random(f"{seed}/{number}")
    limit = draw.uniform(*_LIMIT)
    instructions = draw.choice(_INSTRUCTIONS)
    rounds: list[Round] = []
    users: list[bool] = []
    total = max(round(_lognormal(draw, _START)), instructions + 1)
    after_user = total  # the last prompt that a user began
    reasoning = output = 0  # reasoning: of the rounds since then
    at_s = 60.0 * number
    for index in range(length):
        user = index == 0 or draw.random() < _USER_SHARE
        kept = total
        if not index:
            kept = instructions
        else:
            wait_s = _lognormal(draw, _HUMAN_WAIT_S if user else _TOOL_WAIT_S)
            at_s += rounds[-1].service_s + wait_s
            added = _USER_TEXT if user else next(row[1:] for row in _TOOL_RESULT if total <= row[0])
            total += output + round(_lognormal(draw, added))
            if user and draw.random() < DROPS:
                kept = after_user
                total = max(total - reasoning, kept + 1)
            if total > limit:
                total = round(_lognormal(draw, _SUMMARY))
                kept = instructions
        if index and draw.random() < MISSES["user" if user else "tool"]:
            kept = min(kept, draw.choice((0, instructions)))
        prefix = min(kept, total) // _CACHE_STEP * _CACHE_STEP
        output = max(round(_lognormal(draw, _OUTPUT)), 1)
        if user:
            after_user, reasoning = total, 0
        reasoning += round(output * draw.uniform(*_REASONING))
        service_s = _lognormal(draw, _FIRST_TOKEN_S) + output / _TOKENS_PER_S
        rounds.append(Round(name, at_s, index, total, prefix, output, service_s))
        users.append(user)
    return CodexSession(tuple(rounds), tuple(users))


def _lognormal(draw: random.Random, median_sigma: Sequence[float]) -> float:
    median, sigma = median_sigma
    return median * math.exp(draw.gauss(0.0, sigma))
