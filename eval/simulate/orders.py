"""Who goes next from a pool: the policy's queue as the server uses it, by score or by last access.

An order names units of `sglang_histate.policy`; carrying them out is `tiered`'s. A new policy is a new order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from eval.simulate.contents import Contents
from eval.simulate.costs import Costs
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import DEFAULT_TAU, Eviction
from sglang_histate.policy.units import Pool, Unit


class Order(Protocol):
    """Of one pool."""

    pool: Pool

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        """Return the first unit that may go, None if there is none. It stays until the contents lose it."""


MakeOrder = Callable[[Contents, Pool], Order]


def queue(costs: Costs, mode: Eviction, tau: float = DEFAULT_TAU) -> MakeOrder:
    """Return orders that are the server's queue in one of its modes."""
    return lambda contents, pool: EvictionQueue(contents.tree, pool, costs.kv_token_bytes, tau, mode)
