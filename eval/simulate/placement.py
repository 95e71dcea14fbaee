"""Where inside a prompt a system keeps checkpoints. The ends of prompt and answer are not chosen here: all keep them.

Positions are pages from the start of the prompt. A placement is asked once per request, when the pages that are
left to compute are known; a future one may be learned, so it also hears how far KV of earlier requests goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from eval.simulate.costs import PAGE_TOKENS
from sglang_histate.policy.capture_plan import plan_positions
from sglang_histate.policy.hit_prior import TAIL_PAGES, HitPrior
from sglang_histate.policy.interval import NO_INTERVAL, IntervalPolicy
from sglang_histate.policy.scarcity import price_of_a_hit
from sglang_histate.policy.segment_plan import plan_segment

BLOCK_TOKENS = 576
"""A cache block of vLLM for this model: its states take whole blocks, and this is what the paper's pool had."""


@dataclass(frozen=True)
class Segment:
    """What is left of a prompt: tokens `start` (where it was restored, whole pages) to `end`.

    `branch`: page up to which a cache had KV, beyond the restored ones; None if no further. `pressure`: T_KV / T_state.
    `parted`: (page, end) if the request leaves a run of pages inside it, else None. `price`: tokens that a checkpoint
    has to save over all requests to come; `inside`: how many of those are expected to hit this segment.
    """

    start: int
    end: int
    branch: int | None
    pressure: float
    parted: tuple[int, int] | None = None
    price: float = 0.0
    inside: float = 0.0


class Placement(Protocol):
    """See the module docstring."""

    @property
    def chunk_tokens(self) -> int:
        """A prefill chunk that does not end the prompt ends on a multiple of this."""

    def positions(self, segment: Segment) -> tuple[int, ...]:
        """Return pages within the segment, ascending."""

    def at_chunk_end(self, page: int) -> bool:
        """Return whether the state is kept after a chunk that ends there and does not end the prompt."""

    def facts(self) -> dict[str, Any]:
        """Return what was chosen, for the records."""


@dataclass(frozen=True)
class Ends:
    """Nothing inside; with `branches` also where KV went on and no checkpoint was (an observed branching point).

    With `chunk_ends` also wherever a prefill chunk happens to end.
    """

    branches: bool = False
    chunk_ends: bool = False
    chunk_tokens: int = PAGE_TOKENS

    def positions(self, segment: Segment) -> tuple[int, ...]:
        return (segment.branch,) if self.branches and segment.branch is not None else ()

    def at_chunk_end(self, page: int) -> bool:
        return self.chunk_ends

    def facts(self) -> dict[str, Any]:
        return {}


def with_extras(segment: Segment, tokens: Iterable[int] = (), below: bool = False) -> tuple[int, ...]:
    """Return positions in tokens as pages, with those that the server keeps at any interval.

    They are the observed branching point, and one page before the end for the same prompt sent again, which is
    computed from one token before its end at the latest. With `below` also a page below the last whole one.
    """
    found = {at // PAGE_TOKENS for at in tokens} | {(segment.end - 1) // PAGE_TOKENS}
    if below:
        found.add(segment.end // PAGE_TOKENS - 1)
    if segment.branch is not None:
        found.add(segment.branch)
    return tuple(sorted(at for at in found if segment.start < at * PAGE_TOKENS <= segment.end))


@dataclass(frozen=True)
class Adaptive:
    """The server's plan: an interval for the segment, and the extra positions.

    `scarce`: storage is priced by what the tier gives up for it, not by N_s x pressure. `below`: see `with_extras`.
    """

    interval: IntervalPolicy
    state_tokens: float
    scarce: bool = False
    below: bool = False
    chunk_tokens: int = PAGE_TOKENS
    chosen: Counter[int] = field(default_factory=Counter)

    def positions(self, segment: Segment) -> tuple[int, ...]:
        length = segment.end - segment.start
        if self.scarce:
            interval = self.interval.choose(length, price_of_a_hit(segment.price, segment.inside))
        else:
            interval = self.interval.choose(length, self.state_tokens, segment.pressure)
        self.chosen[interval] += 1
        planned = plan_positions(segment.start, segment.end, interval, PAGE_TOKENS)
        return with_extras(segment, planned, self.below)

    def at_chunk_end(self, page: int) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        """Return how many segments got which interval, in tokens."""
        counts = sorted(self.chosen.items(), key=lambda one: (one[0] == NO_INTERVAL, one[0]))
        return {
            "intervals": {
                "none" if interval == NO_INTERVAL else str(interval): count for interval, count in counts
            }
        }


@dataclass(frozen=True)
class Learned:
    """Where hits are expected to save more than a checkpoint costs: `sglang_histate.policy.segment_plan`."""

    prior: HitPrior = field(default_factory=HitPrior)
    chunk_tokens: int = PAGE_TOKENS
    chosen: Counter[int] = field(default_factory=Counter)

    def positions(self, segment: Segment) -> tuple[int, ...]:
        if segment.parted is not None:
            self.prior.parted(*segment.parted)
        start, end = segment.start // PAGE_TOKENS, segment.end // PAGE_TOKENS
        self.prior.segment(start, end)
        given = with_extras(segment)
        planned = plan_segment(self.prior, start, end, segment.price / PAGE_TOKENS, given)
        self.chosen[len(planned)] += 1
        return tuple(sorted({*planned, *given}))

    def at_chunk_end(self, page: int) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        """Return how many segments got how many checkpoints beside the extra ones, and what was learned."""
        return {
            "planned": {str(count): times for count, times in sorted(self.chosen.items())},
            "hits_below_end": [self.prior.below_end(pages) for pages in range(1, TAIL_PAGES + 1)],
            "hits_inside": self.prior.inside(),
        }


@dataclass(frozen=True)
class StepEnds:
    """vLLM's align: wherever a step ends on a block boundary. Its scheduler makes chunks end there.

    The server's extra positions are kept too: the interval alone is exchanged.
    """

    chunk_tokens: int = BLOCK_TOKENS

    def positions(self, segment: Segment) -> tuple[int, ...]:
        return with_extras(segment)

    def at_chunk_end(self, page: int) -> bool:
        return page * PAGE_TOKENS % BLOCK_TOKENS == 0

    def facts(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class EveryBlocks:
    """One checkpoint every `blocks` cache blocks, counted from the start of the sequence, and the extra positions."""

    blocks: int
    chunk_tokens: int = PAGE_TOKENS

    def positions(self, segment: Segment) -> tuple[int, ...]:
        every = self.blocks * BLOCK_TOKENS
        first = segment.start // every * every + every
        return with_extras(segment, range(first, segment.end, every))

    def at_chunk_end(self, page: int) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class EveryPages:
    """After every so many pages of the prompt, whatever that costs: with 1, what no placement can exceed."""

    pages: int = 1
    chunk_tokens: int = PAGE_TOKENS

    def positions(self, segment: Segment) -> tuple[int, ...]:
        first = segment.start // PAGE_TOKENS // self.pages * self.pages + self.pages
        every = range(first * PAGE_TOKENS, segment.end + 1, self.pages * PAGE_TOKENS)
        return with_extras(segment, every)

    def at_chunk_end(self, page: int) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {}
