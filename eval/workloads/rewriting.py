"""The synthetic workload of rewriting sessions (arXiv:2610.41508): 16 turns of 8,192 new tokens each.

A request that does not rewrite has the whole prompt before it and `new_tokens` more; the answer before is part of
those. A rewriting request keeps the first p tokens of the prompt before it, p a whole number of blocks, and discards
the rest. Then, by `after`:

- `DISCARD`: `new_tokens` follow p at once. The prompt is shorter than without the rewrite; every request, rewriting
  or not, has `new_tokens` new ones. This is the default: the paper speaks of the discarded content.
- `REPLACE`: other tokens take the place of the discarded ones, as many, then `new_tokens` follow. Lengths are those
  without the rewrite.

p = length - depth, the length being that of the prompt before. The paper does not say how deep its rewrites go, so
`depth` is a parameter:

- `UNIFORM`: every block of the prompt before is the first discarded one with equal probability.
- `RECENT`: depths fall off exponentially with a mean of one turn's new tokens.
- `WEKA`: the depths measured in 47,948 turn pairs of 710 Claude Code sessions that changed more than the last block:
  see `WEKA_DEPTHS`.

The share is of all requests. Which ones rewrite is drawn once for a seed and all shares: a higher share rewrites
what a lower one does and more, at the same places as long as what is before is the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from eval.workloads.sessions import Session, Turn

SHARES = (0.025, 0.05, 0.075, 0.1)
"""Four levels up to 10 %, as many as the paper has; it names only the last."""

WEKA_DEPTHS = (
    # (weight, least, most): 2 to 4 blocks, 5 blocks to 10 % of the prompt, to 50 %, to all but nothing, all of it.
    # Blocks are whole numbers, shares of the prompt are fractions; uniform in between.
    (0.78, 2, 4),
    (0.15, 5, 0.1),
    (0.12, 0.1, 0.5),
    (1.59, 0.5, 1.0),
    (0.17, 1.0, 1.0),
)
_BLOCK = 64


class Depth(Enum):
    """How deep a rewrite goes, see the module."""

    UNIFORM = "uniform"
    RECENT = "recent"
    WEKA = "weka"


class After(Enum):
    """What takes the place of the discarded tokens, see the module."""

    DISCARD = "discard"
    REPLACE = "replace"


@dataclass(frozen=True)
class Rewriting:
    """The workload's parameters; lengths in tokens, times in seconds.

    Pauses between turns are exponential with mean `pause_s`; they are not part of the paper's description.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    share: float
    sessions: int = 24
    turns: int = 16
    new_tokens: int = 8192
    output_tokens: int = 256
    depth: Depth = Depth.UNIFORM
    after: After = After.DISCARD
    pause_s: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0")
        if self.new_tokens < _BLOCK or self.new_tokens % _BLOCK:
            raise ValueError(f"new_tokens {self.new_tokens} is no positive multiple of {_BLOCK}")
        if not 0 <= self.pause_s < math.inf:
            raise ValueError(f"pause_s {self.pause_s} is no time")
        if not 0 <= self.share <= self.most_share:
            raise ValueError(
                f"share {self.share} is not between 0 and {self.most_share:g}: first turns cannot rewrite"
            )

    @property
    def most_share(self) -> float:
        """The share if every turn but the first of each session rewrites."""
        return (self.turns - 1) / self.turns

    @property
    def name(self) -> str:
        """Equal names, equal requests."""
        return (
            f"rewriting-{100 * self.share:g}%-{self.depth.value}-{self.after.value}-{self.sessions}x{self.turns}x"
            f"{self.new_tokens}+{self.output_tokens}-pause{self.pause_s:g}-seed{self.seed}"
        )


def rewriting_sessions(what: Rewriting) -> list[Session]:
    """Return the sessions, with 64-token blocks. Equal arguments give equal sessions."""
    chosen = rewriting_requests(what)
    return [_session(what, number, chosen) for number in range(what.sessions)]


def rewriting_requests(what: Rewriting) -> frozenset[tuple[int, int]]:
    """Return which requests rewrite, as (session, turn), both from 0."""
    eligible = [(session, turn) for session in range(what.sessions) for turn in range(1, what.turns)]
    random.Random(f"{what.seed}/which").shuffle(eligible)
    return frozenset(eligible[: round(what.share * what.sessions * what.turns)])


def _session(what: Rewriting, number: int, chosen: frozenset[tuple[int, int]]) -> Session:
    turns: list[Turn] = []
    blocks: list[int] = []
    fresh = 0
    start = 0.0
    for index in range(what.turns):
        draw = random.Random(
            f"{what.seed}/{number}/{index}"
        )  # one a turn: other turns' draws do not shift it
        gap = draw.expovariate(1 / what.pause_s) if index and what.pause_s else 0.0
        new = what.new_tokens // _BLOCK
        if (number, index) in chosen:
            lost = discarded_blocks(draw, len(blocks), what.depth, new)
            del blocks[len(blocks) - lost :]
            new += lost if what.after is After.REPLACE else 0
        blocks += range(fresh, fresh + new)
        fresh += new
        start += gap
        turns.append(Turn(len(blocks) * _BLOCK, what.output_tokens, tuple(blocks), start, gap, 0.0))
    return Session(f"rewriting-{number:03d}", _BLOCK, tuple(turns))


def discarded_blocks(draw: random.Random, length: int, depth: Depth, turn_blocks: int) -> int:
    """Return how many of a prompt's last blocks a rewrite discards, from 1 to all `length` of them."""
    if depth is Depth.UNIFORM:
        return draw.randint(1, length)
    if depth is Depth.RECENT:
        return min(max(math.ceil(draw.expovariate(1 / turn_blocks)), 1), length)
    return _weka(draw, length)


def _weka(draw: random.Random, length: int) -> int:
    weights: Sequence[float] = [weight for weight, _, _ in WEKA_DEPTHS]
    _, least, most = draw.choices(WEKA_DEPTHS, weights)[0]
    low, high = (bound if isinstance(bound, int) else math.ceil(bound * length) for bound in (least, most))
    return min(draw.randint(min(low, high), max(low, high)), length)
