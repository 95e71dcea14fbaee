"""The rank of a unit: H = t + tau * C / M', lowest goes first.

t is the unit's last access in ticks of the logical clock (one per request), C what losing it costs in tokens,
and M' what removing it frees, measured in tokens of KV. So C / M' compares tokens with tokens, and tau is in
accesses: a unit whose loss costs as many tokens as its bytes could keep as KV ranks like one used tau
accesses later.

`Eviction.LOSS` ranks by what is expected to be lost: C / M' times the probability that the unit is used again. If that
falls by a factor e with each tau accesses of idleness, the order of (C / M') * exp(-(now - t) / tau) never changes
between uses, and is the order of

    H = t + tau * ln(1 + PRECISION * C / M')

where the 1 lets what costs nothing to lose rank by its last access. A dear unit outlives a cheap one by the logarithm of
what it is dearer, not by the difference: an idle session's only way back goes after the many checkpoints of busy ones
that hardly save anything, and still goes once it has been idle for long.
"""

from __future__ import annotations

from enum import StrEnum
from math import log1p

from sglang_histate.policy.recompute import COST_SCALE

DEFAULT_TAU = 20.0
"""Accesses: about one round of 24 live sessions.

That is what a session's final checkpoint is worth at most beyond its last use. Less, and sessions that pause for a round
lose it to checkpoints that nobody needs; more, and sessions that have ended keep theirs while live ones recompute. On
recorded Claude Code sessions, replayed on a server and simulated in 45 settings with 6 to 24 live sessions, 10 to 50
were close to each other and better than `lru`; 100 and more lost to it where clients drop parts of the answers
(docs/results/eviction.md). Fewer live sessions want less, more want more."""


class Eviction(StrEnum):
    """What decides the rank, and what a hit refreshes."""

    SCORE = "score"
    """H as above; a hit refreshes every earlier checkpoint on its path."""
    LOSS = "loss"
    """H from the expected loss; a hit refreshes as with `SCORE`."""
    LRU = "lru"
    """Last access only; a hit refreshes the checkpoint it was restored from and the KV on its path."""
    LRU_REFRESH = "lru-refresh"
    """Last access only; a hit refreshes every earlier checkpoint on its path too."""

    @property
    def priced(self) -> bool:
        """Whether it ranks by what losing a unit costs, weighted by tau."""
        return self in (Eviction.SCORE, Eviction.LOSS)


PRECISION = 1000.0
"""C / M' below 1 / PRECISION, some tokens for a checkpoint, count as next to nothing."""


def loss_value(price: int, freed: int, kv_token_bytes: int, tau: float) -> float:
    """Return tau * ln(1 + PRECISION * C / M'), arguments as of `value`."""
    return tau * log1p(PRECISION * (price * kv_token_bytes / (COST_SCALE * freed))) if price else 0.0


def value(price: int, freed: int, kv_token_bytes: int, tau: float) -> float:
    """Return tau * C / M' for a price in tokens * `recompute.COST_SCALE` and `freed` > 0 bytes.

    The quotient of the two integers is rounded once, so that the value never falls where price / freed does
    not: a queue may then leave a unit where it is until it comes first.
    """
    return tau * (price * kv_token_bytes / (COST_SCALE * freed)) if price else 0.0
