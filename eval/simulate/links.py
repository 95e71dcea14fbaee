"""Links that carry bytes one transfer after another: PCIe each way, the SSD's reads, its writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from eval.simulate.costs import Costs


@dataclass
class Link:
    """First come, first served. `free_s`: when what was asked for so far has passed."""

    bytes_s: float
    latency_s: float = 0.0
    free_s: float = 0.0
    carried_bytes: int = 0

    def send(self, now_s: float, size_bytes: int) -> float:
        """Queue a transfer; return when its last byte has arrived (`now_s` if there is nothing to carry)."""
        if not size_bytes:
            return now_s
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_s
        self.carried_bytes += size_bytes
        return self.free_s + self.latency_s


@dataclass
class Links:
    """The four of one machine. Reads of the SSD do not wait for writes: the store gives them priority."""

    to_device: Link
    to_host: Link
    ssd_read: Link
    ssd_write: Link
    in_flight: list[float] = field(default_factory=list)
    """When each write to the SSD that was asked for ends, ascending; past ones are dropped by `writes_at`."""

    @classmethod
    def of(cls, costs: Costs) -> Links:
        return cls(
            Link(costs.pcie_bytes_s),
            Link(costs.pcie_bytes_s),
            Link(costs.ssd_read_bytes_s, costs.ssd_latency_s),
            Link(costs.ssd_write_bytes_s),
        )

    def write_ssd(self, now_s: float, size_bytes: int) -> float:
        """Queue one record for the SSD; return when it is there."""
        end = self.ssd_write.send(now_s, size_bytes)
        self.in_flight.append(end)
        return end

    def writes_at(self, now_s: float) -> int:
        """Return how many records are still on their way to the SSD."""
        done = 0
        for end in self.in_flight:
            if end > now_s:
                break
            done += 1
        del self.in_flight[:done]
        return len(self.in_flight)
