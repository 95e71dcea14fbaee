"""One line of the table: what one ranking did with all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.aligned import aligned
from eval.quantile import quantile as quantile
from sglang_histate.policy.score import Eviction


@dataclass(frozen=True)
class Mode:
    """A ranking; `tau` in requests has a meaning for those that are priced."""

    eviction: Eviction
    tau: float

    @property
    def name(self) -> str:
        return f"{self.eviction.value} tau={self.tau:g}" if self.eviction.priced else self.eviction.value


@dataclass(frozen=True)
class Row:
    """Sums over all requests, in tokens; times in seconds, None where there is no server.

    `lost`: computed again although an infinite cache would have had them. `with_kv`: those of them, or of what
    nobody could have reused, whose KV was on device or host, as the policy or the server counts them.
    """

    mode: str
    requests: int
    prompt: int
    reusable: int
    cached: int
    lost: int
    with_kv: int
    evictions: Mapping[str, int]
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    wall_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text; evictions by tier as intermediates/bundles, last how `lost` compares with lru."""
    base = next((row.lost for row in rows if row.mode == Eviction.LRU.value), None)
    lines: list[tuple[str, ...]] = [
        (
            "mode", "requests", "prompt", "cached", "lost", "lost %", "with-KV", "device i/b", "host i/b",
            "ssd i/b", "TTFT p50 ms", "p95 ms", "wall s", "lost/lru",
        )
    ]  # fmt: skip
    for row in rows:
        evicted = [
            f"{row.evictions[f'{tier}_intermediate']}/{row.evictions[f'{tier}_bundle']}" for tier in _TIERS
        ]
        lines.append(
            (
                row.mode,
                str(row.requests),
                str(row.prompt),
                str(row.cached),
                str(row.lost),
                f"{100 * row.lost / max(row.reusable, 1):.1f}",
                str(row.with_kv),
                *evicted,
                *(_ms(value) for value in (row.ttft_p50_s, row.ttft_p95_s)),
                "-" if row.wall_s is None else f"{row.wall_s:.0f}",
                "-" if not base else f"{row.lost / base:.3f}",
            )
        )
    return aligned(lines)


_TIERS = ("device", "host", "ssd")


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1000 * value_s:.0f}"
