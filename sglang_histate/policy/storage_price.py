"""What a byte of a tier costs, in tokens: what the tier gives up for it (arXiv:2610.41508 takes residence times instead).

While a tier is far from full a byte costs nothing but its write. A full tier gives up its least valuable entries, and the
moving average of what those were still worth is the price: for each victim the tokens that a hit would compute again,
times the probability that one still comes, over its bytes. Victims that nobody would have asked for again cost
nothing, so capture stays dense while the tier is full of what is over; it thins out by itself when what is evicted
would have been used.

    price = StoragePrice()
    price.evicted(cost_tokens=400.0, freed_bytes=51 << 20, returns=0.02)
    price.per_byte(fill=0.97)

Between `FREE_BELOW` and full the price rises from 0: what is placed there is evicted soon after the tier is full, so a
tier that fills suddenly does not go from free to full price in one step. A tier that has evicted nothing yet is free
however full it is: its first victim is the first price.
"""

from __future__ import annotations

FREE_BELOW = 0.75
"""Share of a tier below which a byte is free."""

VICTIM_WEIGHT = 1 / 64
"""How much one victim moves the price: some dozens, a request's worth for several sessions."""


class StoragePrice:
    """Of one tier. The same victims in the same order give the same price on every rank."""

    __slots__ = ("_mean", "victims")

    def __init__(self) -> None:
        self._mean = 0.0
        self.victims = 0

    def evicted(self, cost_tokens: float, freed_bytes: int, returns: float) -> None:
        """Count a victim: tokens that a hit on it would compute again, bytes it freed, probability that a hit would come.

        Raises:
            ValueError: it freed nothing.
        """
        if freed_bytes <= 0:
            raise ValueError(f"a victim that frees {freed_bytes} bytes has no price")
        lost = returns * cost_tokens / freed_bytes
        # A plain mean at first, then a moving one.
        self.victims += 1
        self._mean += (lost - self._mean) * max(1 / self.victims, VICTIM_WEIGHT)

    def per_byte(self, fill: float) -> float:
        """Return tokens per byte for a tier of which the share `fill`, 0 to 1, is in use."""
        return self._mean * min(max((fill - FREE_BELOW) / (1 - FREE_BELOW), 0.0), 1.0)
