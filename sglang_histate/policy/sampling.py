"""Which restored prefixes are checked: a share of them, picked by a hash, so that every rank picks the same."""

from __future__ import annotations

from hashlib import sha256


def is_sampled(key: bytes, number: int, rate: float) -> bool:
    """Return whether restore `number` (counted from the start), of the checkpoint `key`, is among the share `rate`.

    The number is part of it, so that one prefix that is restored again and again is checked now and then.
    """
    drawn = int.from_bytes(sha256(key + number.to_bytes(8, "big")).digest()[:8], "big")
    return drawn < rate * 2.0**64
