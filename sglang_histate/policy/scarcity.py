"""What keeping a checkpoint costs in each tier: the price of its bytes there, and of writing them.

A price is in tokens of recomputation, expected over all requests still to come, so it can be compared with what a
checkpoint is expected to save (`greedy_plan`) and with the price of another tier.

    scarcity = Scarcity()
    scarcity.requested(age)                                  # once per request
    scarcity.evicted(Tier.SSD, cost_tokens, freed, age)      # for each victim
    scarcity.checkpoint(Tier.SSD, size, fill, write_scarcity)
"""

from __future__ import annotations

from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.return_model import ReturnModel
from sglang_histate.policy.storage_price import StoragePrice

READ_TOKENS_PER_BYTE = 6e-6
"""What a byte that has left the host costs when it is read back from the SSD: 1 / (5 GB/s x 30 us of prefill for a token),
rounded down. A checkpoint of Qwen3.5-9B is 300 tokens, the break-even of reading one."""

WRITE_TOKENS_PER_BYTE = 8e-8
"""What a byte has to save to be written to the SSD at all: a write takes as long as a read, and may take something over a
hundredth of that from the computing of others; and flash wears. A checkpoint of Qwen3.5-9B is 4 tokens, as bf16 2."""

LEAST_WRITE_TOKENS = 2.0
"""What a checkpoint has to save however small it is: planning it, its record and its entry take the scheduler's time, some tens of
microseconds, which is what computing two tokens takes. Without it a small model's checkpoints would be as good as free."""

AHEAD_OF_ITS_PLACE = 4.0
"""How many times its place on the SSD KV has to be worth to be copied there before it is what the host gives up next: what is
copied ahead lies in two tiers."""

MOST_PRICE = 1e12
"""In tokens: more than any checkpoint saves."""


def price_of_a_hit(price: float, inside: float) -> float:
    """Return what a checkpoint has to save one hit inside its segment to be worth `price`, `inside` such hits expected.

    This is what `interval.choose_interval` takes for N_s x pressure.
    """
    return min(price / inside, MOST_PRICE) if inside > 0 else MOST_PRICE


class Scarcity:
    """Prices of all tiers, and the return model that they share."""

    __slots__ = ("returns", "tiers")

    def __init__(self) -> None:
        self.returns = ReturnModel()
        self.tiers = tuple(StoragePrice() for _ in TIERS)

    def requested(self, age: int | None) -> None:
        """Count a request that resumed what had been idle for `age` ticks, None: it resumed nothing."""
        self.returns.observe(age)

    def inside(self, start: int, end: int, end_share: float) -> float:
        """Return how many of the requests to come are expected to hit inside a segment of tokens `start` to `end` > 0.

        One returns with the probability of what was just used, and then hits the end with probability `end_share`, q, or
        any of the trajectory's tokens.
        """
        return self.returns.probability(0) * (1 - end_share) * (end - start) / end

    def evicted(
        self, tier: Tier, cost_tokens: float, freed_bytes: int, age: int, read_back: bool = False
    ) -> None:
        """Count a victim of a tier: what a hit on it would cost, what it freed, how many ticks it was idle.

        `read_back`: the SSD may have it, so a hit costs at least the read. Without that a full host would seem free
        wherever the SSD catches what it gives up.
        """
        if read_back:
            cost_tokens = max(cost_tokens, freed_bytes * READ_TOKENS_PER_BYTE)
        self.tiers[tier].evicted(cost_tokens, freed_bytes, self.returns.probability(age))

    def worth_copying(
        self, cost_tokens: float, size_bytes: int, age: int, fill: float, ahead: bool = False
    ) -> bool:
        """Return whether KV of the host is worth more than what the SSD gives up for a copy of it.

        Args:
            cost_tokens: what a hit on it would compute again if it were lost.
            size_bytes: what it takes on the host, > 0.
            age: ticks that it was idle.
            fill: share of the SSD in use, 0 to 1.
            ahead: it is not yet what the host gives up next.
        """
        worth = cost_tokens * self.returns.probability(age) / size_bytes
        return worth >= (AHEAD_OF_ITS_PLACE if ahead else 1.0) * self.tiers[Tier.SSD].per_byte(fill)

    def checkpoint(self, tier: Tier, size_bytes: int, fill: float, write_scarcity: float = 0.0) -> float:
        """Return the tokens that a checkpoint has to save to be worth its place.

        Args:
            tier: where it would go.
            size_bytes: what it takes there.
            fill: share of the tier in use, 0 to 1.
            write_scarcity: price of a write to the SSD, 0 (free) to 1 (none left), see `write_budget`.
        """
        price = self.tiers[tier].per_byte(fill) * size_bytes
        if tier is not Tier.SSD:
            return price
        write = max(WRITE_TOKENS_PER_BYTE * size_bytes, LEAST_WRITE_TOKENS)
        return price + write / (1 - write_scarcity) if write_scarcity < 1 else float("inf")
