"""The rank of a unit: H = t + tau * C / M', lowest goes first.

t is the unit's last access in ticks of the logical clock (one per request), C what losing it costs in tokens,
and M' what removing it frees, measured in tokens of KV. So C / M' compares tokens with tokens, and tau is in
accesses: a unit whose loss costs as many tokens as its bytes could keep as KV ranks like one used tau
accesses later.
"""

from __future__ import annotations

from enum import StrEnum

from sglang_histate.policy.recompute import COST_SCALE

DEFAULT_TAU = 100.0
"""Accesses: about four rounds of 24 live sessions.

That is what an idle session's final checkpoint is worth at most. Less, and sessions that pause for a few
rounds lose it to checkpoints that nobody needs; more, and sessions that ended keep theirs while live ones
recompute. A simulation of 24 sessions (one host pool; N_s 100 with a checkpoint every 256 tokens and N_s 1572
every 1024; room for 150,000 to 900,000 tokens of KV; 4 of 10 hits inside a session, some sessions asleep)
recomputed least at 100 or 300 in every case. 10 took up to twice as much, 1000 up to five times, lru up to
six times. Where states are so large that nothing fits (N_s 1572 every 256), tau hardly matters."""


class Eviction(StrEnum):
    """What decides the rank, and what a hit refreshes."""

    SCORE = "score"
    """H as above; a hit refreshes every earlier checkpoint on its path."""
    LRU = "lru"
    """Last access only; a hit refreshes the checkpoint it was restored from and the KV on its path."""
    LRU_REFRESH = "lru-refresh"
    """Last access only; a hit refreshes every earlier checkpoint on its path too."""


def value(price: int, freed: int, kv_token_bytes: int, tau: float) -> float:
    """Return tau * C / M' for a price in tokens * `recompute.COST_SCALE` and `freed` > 0 bytes.

    The quotient of the two integers is rounded once, so that the value never falls where price / freed does
    not: a queue may then leave a unit where it is until it comes first.
    """
    return tau * (price * kv_token_bytes / (COST_SCALE * freed)) if price else 0.0
