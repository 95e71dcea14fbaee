"""What a checkpoint's place costs in each tier, from what requests and evictions have shown so far."""

from __future__ import annotations

from typing import Any

from eval.simulate.contents import Contents
from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.scarcity import Scarcity
from sglang_histate.policy.units import Unit


class Prices:
    """The server's `Scarcity`, fed by the tiers of a simulation."""

    def __init__(self, contents: Contents, has_ssd: bool) -> None:
        self._contents = contents
        self._has_ssd = has_ssd
        self._scarcity = Scarcity()

    def requested(self, age: int | None) -> None:
        """Count a request that resumed what had been idle for `age` ticks, None: it resumed nothing."""
        self._scarcity.requested(age)

    def evicted(self, tier: Tier, unit: Unit) -> None:
        """Count a victim of host or SSD, where historical checkpoints can go."""
        if tier is not Tier.DEVICE:
            age = self._contents.clock - unit.last_access
            below = tier is Tier.HOST and self._has_ssd
            self._scarcity.evicted(tier, unit.cost_tokens, unit.bytes, age, read_back=below)

    def of(self, tier: Tier, write_scarcity: float = 0.0) -> float:
        """Return the tokens that a checkpoint has to save in a tier, see `Scarcity.checkpoint`."""
        space = self._contents.state_space[tier]
        fill = space.used / space.limit if space.limit else 1.0
        return self._scarcity.checkpoint(tier, self._contents.state_size(tier), fill, write_scarcity)

    def worth_copying(self, unit: Unit, ahead: bool) -> bool:
        """Return whether KV of the host is worth its place on the SSD, see `Scarcity.worth_copying`."""
        space, age = self._contents.kv_space[Tier.SSD], max(self._contents.clock - unit.last_access, 0)
        fill = space.used / space.limit if space.limit else 1.0
        return self._scarcity.worth_copying(unit.cost_tokens, unit.bytes, age, fill, ahead)

    def inside(self, start: int, end: int) -> float:
        """Return how many requests to come are expected to hit inside a segment of tokens `start` to `end`."""
        return self._scarcity.inside(start, end, self._contents.tree.end_share.value)

    def facts(self) -> dict[str, Any]:
        return {
            "price_tokens": {tier.name.lower(): self.of(tier) for tier in TIERS[1:]},
            "returns": [self._scarcity.returns.probability(age) for age in (0, 16, 64, 256, 1024)],
        }
