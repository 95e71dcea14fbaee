"""The requests of each case. A case is a generator: it yields prompts and is sent the answers.

Every system gets the same prompts in the same order after a flush. Where a turn continues the conversation, the
answer of the turn before is part of the prompt; the answers have to be equal across systems anyway.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from eval.internal_hits.systems import PAGE_SIZE

LONG = 8192
CUT = 5000
DEEP_CUT = 7000
NEW = 200
OUTPUT = 8
_TURNS = (2048, 500, 900, 1500)
_RANDOM_TOKENS = range(33, 127)  # printable ASCII: valid ids in every vocabulary, the demo model's included


@dataclass(frozen=True)
class Ask:
    """One request. `match` is how many of its first tokens were sent before; None: it only prepares the next ones.

    Requests of equal `row` are reported together.
    """

    row: str
    prompt: list[int]
    match: int | None = None
    output_tokens: int = OUTPUT
    flush_before: bool = False

    @property
    def reusable(self) -> int:
        """Most tokens that any paged cache could reuse: the match in whole pages, one token always computed."""
        return (min(self.match or 0, len(self.prompt) - 1) // PAGE_SIZE) * PAGE_SIZE


Dialogue = Generator[Ask, tuple[int, ...], None]


@dataclass(frozen=True)
class Scale:
    """How large a run is. The KV pools, in tokens, are those that the push-out cases have to overflow."""

    device_kv_tokens: int
    host_kv_tokens: int
    repeats: int
    points: int


class Draw:
    """Seeded random tokens and cuts."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(_RANDOM_TOKENS, k=count)

    def cut(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def append_only(draw: Draw, scale: Scale) -> Dialogue:
    history: list[int] = []
    for turn, length in enumerate(_TURNS, 1):
        match = len(history) - 1 if history else 0  # the last output token has no KV yet
        history += draw.tokens(length)
        output = yield Ask(f"turn {turn}", list(history), match=match, output_tokens=72)
        history += output


def first_rewrite(draw: Draw, scale: Scale) -> Dialogue:
    original = draw.tokens(LONG)
    yield Ask("A, new", original, match=0)
    yield Ask(f"A[:{CUT}] + {NEW}", original[:CUT] + draw.tokens(NEW), match=CUT)


def default_chunks(draw: Draw, scale: Scale) -> Dialogue:
    for cut in (CUT, DEEP_CUT):
        original = draw.tokens(LONG)
        yield Ask("A, new", original, match=0)
        yield Ask(f"A[:{cut}] + {NEW}", original[:cut] + draw.tokens(NEW), match=cut)


def random_rewrites(draw: Draw, scale: Scale) -> Dialogue:
    """Each rewrite is a first one: A is sent again after a flush, so that no rewrite profits from another."""
    original = draw.tokens(LONG)
    for number in range(scale.points):
        yield Ask("A, new", original, flush_before=number > 0)
        cut = draw.cut(PAGE_SIZE, LONG - 1)
        yield Ask(f"{scale.points} random rewrites", original[:cut] + draw.tokens(NEW), match=cut)


def push_out(draw: Draw, scale: Scale) -> Dialogue:
    original = draw.tokens(LONG)
    yield Ask("A, new", original)
    for _ in range(scale.device_kv_tokens // LONG + 1):
        yield Ask("others", draw.tokens(LONG))
    yield Ask(f"A[:{CUT}] + {NEW}", original[:CUT] + draw.tokens(NEW), match=CUT)


def return_late(draw: Draw, scale: Scale) -> Dialogue:
    original = draw.tokens(LONG)
    output = yield Ask("A, new", original)
    for _ in range(scale.host_kv_tokens // LONG + 1):
        yield Ask("others", draw.tokens(LONG))
    match = len(original) + len(output) - 1
    yield Ask(f"A + {NEW}", [*original, *output, *draw.tokens(NEW)], match=match)


def rewrite_twice(draw: Draw, scale: Scale) -> Dialogue:
    original = draw.tokens(LONG)
    yield Ask("A, new", original)
    for row in ("first rewrite", "second rewrite", "third rewrite"):
        yield Ask(f"{row} at {CUT}", original[:CUT] + draw.tokens(NEW), match=CUT)


@dataclass(frozen=True)
class Case:
    """`default_chunk`: run without ``--chunked-prefill-size``. `once`: repeats are inside the case."""

    key: str
    title: str
    dialogue: Callable[[Draw, Scale], Dialogue]
    default_chunk: bool = False
    once: bool = False

    def seeds(self, seed: int, scale: Scale) -> Iterator[tuple[int, str]]:
        for repeat in range(1 if self.once else scale.repeats):
            yield repeat, f"{seed}/{self.key}/{repeat}"


CASES = (
    Case("a", "append-only turns", append_only),
    Case("b", "first rewrite", first_rewrite),
    Case("c", "first rewrite, default chunk size", default_chunks, default_chunk=True),
    Case("d", "random rewrite points", random_rewrites, once=True),
    Case("e", "rewrite after A was pushed out of the device", push_out),
    Case("f", "rewrite again at the same point", rewrite_twice),
    Case("h", "A continues after it was pushed out of device and host", return_late, once=True),
)
ZERO_REUSE = "g"
ZERO_REUSE_TITLE = "zero reuse, servers side by side"
