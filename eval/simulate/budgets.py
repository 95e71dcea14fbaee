"""How much each tier holds, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Budgets:
    """Bytes for prefixes and running requests on the device, for prefixes on host and SSD.

    The defaults are the paper's machine.

    Raises:
        ValueError: a negative size, or none on the device.
    """

    device_bytes: int = 45 * GIB
    host_bytes: int = 96 * GIB
    ssd_bytes: int = 150 * GIB

    def __post_init__(self) -> None:
        if self.device_bytes <= 0 or self.host_bytes < 0 or self.ssd_bytes < 0:
            raise ValueError(
                f"{self.device_bytes} bytes on the device, {self.host_bytes} on the host and {self.ssd_bytes} on the SSD: "
                "none may be negative, and the device needs some"
            )


class OverBudget(AssertionError):
    """A tier would hold more than its budget: an error of the simulator."""


class Space:
    """One budget. `pinned` is the part of `used` that cannot be evicted; `peak` the largest use so far.

    `taken`: bytes given out since the start, whatever came back.
    """

    __slots__ = ("limit", "name", "peak", "pinned", "taken", "used")

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.pinned = 0
        self.peak = 0
        self.taken = 0

    @property
    def free(self) -> int:
        return self.limit - self.used

    def take(self, size_bytes: int) -> None:
        """Use bytes, or give them back if negative.

        Raises:
            OverBudget: more than there are, or more given back than were used.
        """
        self.used += size_bytes
        if not 0 <= self.used <= self.limit:
            raise OverBudget(f"{self.name}: {self.used} of {self.limit} bytes used after {size_bytes}")
        self.peak = max(self.peak, self.used)
        self.taken += max(size_bytes, 0)

    def unreserve(self, size_bytes: int) -> None:
        """Give back bytes that were only reserved: what comes in their place is not given out anew."""
        self.take(-size_bytes)
        self.taken -= size_bytes

    def pin(self, size_bytes: int) -> None:
        """Have bytes in use not evictable, or evictable again if negative."""
        self.pinned += size_bytes
        assert 0 <= self.pinned <= self.used, f"{self.name}: {self.pinned} of {self.used} bytes pinned"
