"""How much a record must be worth to be written while bytes are short.

A value is tokens of recomputation saved per byte written. What counts as much depends on model and load, so
a value is compared with those of the records that were offered last: scarcity s (0: bytes are free, 1: none
left) admits the best (1 - s)**2 of them, by bytes. The level of a bucket that more is offered to than it gets
then settles where just the best share fits, whatever the values are.

Why the square: at nine times the rate, a straight line would hold the level at 1/9 of the range, which may be
less than one record, and then chance decides; the square holds it at 1/3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

WINDOW = 256
"""Offers that a value is compared with: some minutes at one record per second, some turns of each session."""
WARM_UP = 8
"""Offers before which nothing is known: everything is admitted while there are bytes."""


class ValueFloor:
    """Deterministic: the same offers in the same order give the same answers."""

    def __init__(self) -> None:
        self._offers: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def admits(self, name: Hashable, value: float, size_bytes: int, scarcity: float) -> bool:
        """Count one offer and say whether it is worth its bytes. Offered again, a name counts once.

        Args:
            name: what is offered.
            value: tokens per byte, >= 0.
            size_bytes: > 0.
            scarcity: 0 to 1.
        """
        self._offers.pop(name, None)
        known = len(self._offers) >= WARM_UP
        admitted = not known or scarcity <= 0 or self._rank(value) >= 1 - (1 - min(scarcity, 1.0)) ** 2
        self._offers[name] = value, size_bytes
        if len(self._offers) > WINDOW:
            self._offers.popitem(last=False)
        return admitted

    def _rank(self, value: float) -> float:
        """Return the share of the offered bytes that is worth less, of those worth the same one half."""
        less = same = total = 0
        for other, size in self._offers.values():
            total += size
            if other < value:
                less += size
            elif other == value:
                same += size
        return (less + same / 2) / total
