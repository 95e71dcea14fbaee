"""A table of plain text for the terminal: what a run prints when it has ended."""

from __future__ import annotations

from eval.aligned import aligned
from eval.metrics.runs import Comparison
from eval.metrics.sensitivity import sensitive
from eval.metrics.system_figures import Part, SystemFigures, figures

_HEADER = (
    "system",
    "requests",
    "errors",
    "hit %",
    "reusable %",
    "with-KV",
    "TTFT mean s",
    "p50",
    "p95",
    "p99",
    "makespan s",
    "SSD written GB",
)


def text_table(comparison: Comparison, baseline: str | None = None) -> str:
    """Return the systems of a comparison, over all requests and over the reuse-sensitive ones.

    "reusable %": share of the infinite cache's reusable tokens; "with-KV": tokens computed again with their KV there.
    """
    chosen = sensitive(comparison, baseline)
    found = list(figures(comparison, chosen).values())
    parts = [
        f"All requests of {comparison.workload}",
        aligned([_HEADER, *(_row(one, one.all) for one in found)]),
    ]
    rows = [_row(one, one.sensitive) for one in found if one.sensitive is not None and one.sensitive.requests]
    parts.append(
        f"Reuse-sensitive requests: {chosen.rule}" + ("" if rows or chosen.keys is None else ": none")
    )
    if rows:
        parts.append(aligned([_HEADER, *rows]))
    return "\n".join(parts)


def _row(one: SystemFigures, part: Part) -> tuple[str, ...]:
    whole = part is one.all
    written = one.ssd_written_bytes if whole else None
    return (
        one.system,
        str(one.requests if whole else part.requests),
        str(one.errors) if whole else "",
        shown(part.hit_rate, 1, 100),
        shown(part.reusable_share, 1, 100),
        shown(part.recomputed_with_kv, 0),
        shown(part.ttft.mean, 3),
        shown(part.ttft.p50, 3),
        shown(part.ttft.p95, 3),
        shown(part.ttft.p99, 3),
        shown(one.makespan_s, 0) if whole else "",
        shown(written, 1, 1e-9) if whole else "",
    )


def shown(value: float | None, places: int, factor: float = 1.0) -> str:
    """A number times `factor` with so many places, "-" if it is not known."""
    return "-" if value is None else f"{value * factor:,.{places}f}"
