"""What a server answers after a restore, beside what it answers when it has computed everything.

A case is a prefix of `depth` tokens and the start of a new turn behind it. First another turn on the same prefix fills
the cache, so that the case finds the prefix's KV on the device and its state on the SSD alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from eval.servers import Server

TURN_TOKENS = 40
"""Of the turn that is measured: less than a page, so that nothing but the prefix can be restored."""
FIRST_TURN_TOKENS = 100
"""Of the one before: more than a page, so that the device keeps the state at its end and not the one at the prefix's."""


class NotRestored(RuntimeError):
    """An answer did not come from a restored checkpoint: the measurement would say nothing."""


@dataclass(frozen=True)
class Answer:
    """`tokens`: greedy. `logprobs`: of the tokens that a server computes without cache, whatever it would choose itself."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Case:
    depth: int
    prefix: list[int]
    first_turn: list[int]
    turn: list[int]


def cases(depth: int, count: int, seed: int) -> list[Case]:
    found = []
    for number in range(count):
        draw = random.Random(f"{seed}-{depth}-{number}")
        parts = (depth, FIRST_TURN_TOKENS, TURN_TOKENS)
        prefix, first, turn = ([draw.randrange(32, 256) for _ in range(size)] for size in parts)
        turn[0] = first[0] ^ 1  # they part at once
        found.append(Case(depth, prefix, first, turn))
    return found


def computed(server: Server, case: Case, tokens: int) -> Answer:
    """Answer `case` with nothing in any cache."""
    server.flush()
    answer = server.generate(case.prefix + case.turn, tokens)
    server.flush()
    forced = _forced(server, case, answer["output_ids"])
    for one in (answer, forced):
        if one["meta_info"]["cached_tokens"]:
            raise NotRestored("a flushed server found something in its cache")
    return Answer(answer["output_ids"], _input_logprobs(forced, tokens))


def fill(server: Server, case: Case) -> None:
    """Put the case's prefix into the cache and its checkpoint on the SSD."""
    server.flush()
    server.generate(case.prefix + case.first_turn, 1)
    server.settle()


def restored(server: Server, case: Case, tokens: list[int]) -> Answer:
    """Answer `case` after `fill`. `tokens` are what a server computes without cache.

    Raises:
        NotRestored: the checkpoint was not used.
    """
    answer = server.generate(case.prefix + case.turn, len(tokens))
    details = answer["meta_info"].get("cached_tokens_details") or {}
    if details.get("ssd_checkpoint") != case.depth:
        raise NotRestored(f"at {case.depth} tokens: {details}, the checkpoint on the SSD was not used")
    # The state that was restored is still at the end of the prefix, so this goes on from the same numbers.
    forced = _forced(server, case, tokens)
    if forced["meta_info"]["cached_tokens"] != case.depth:
        raise NotRestored(f"at {case.depth} tokens: {forced['meta_info']['cached_tokens']} were cached")
    return Answer(answer["output_ids"], _input_logprobs(forced, len(tokens)))


def _forced(server: Server, case: Case, tokens: list[int]) -> dict[str, Any]:
    prompt = case.prefix + case.turn
    return server.generate(prompt + tokens, 1, logprob_start_len=len(prompt) - 1)


def _input_logprobs(answer: dict[str, Any], count: int) -> list[float]:
    """Return the log probabilities of the last `count` tokens of the prompt."""
    return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][-count:]]
