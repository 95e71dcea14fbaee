"""The tables of a report, in Markdown: systems are rows, a figure that is not known is "-"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from eval.metrics import Comparison, Interval, Part, SystemFigures, intervals, ratios
from eval.metrics.runs import Key
from eval.metrics.spread import COLUMNS
from eval.metrics.table import shown
from eval.records import TIERS


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def part_tables(
    comparison: Comparison, found: Iterable[tuple[str, Part]], keys: Collection[Key] | None, seed: int
) -> str:
    """A table of hits and one of TTFT of some requests; in brackets 95 % intervals by session.

    `found`: the figures by system, `keys`: the requests that they are of (None: all).
    """
    hits, times = [], []
    for name, part in found:
        spans = intervals(comparison.systems[name], keys, seed=seed)
        hits.append(
            (
                name,
                f"{part.requests:,}",
                f"{shown(part.hit_rate, 1, 100)}{span(spans['hit_rate'], 1, 100)}",
                *(shown(part.tier_rates[tier], 1, 100) for tier in TIERS),
                f"{shown(part.reusable_share, 1, 100)}{span(spans['reusable_share'], 1, 100)}",
                shown(part.recomputed_with_kv, 0),
            )
        )
        ttft = part.ttft
        values = zip(COLUMNS, (ttft.mean, ttft.p50, ttft.p95, ttft.p99), strict=True)
        times.append((name, *(f"{shown(value, 3)}{span(spans[column], 3)}" for column, value in values)))
    tiers = (
        TIERS if comparison.source == "simulation" else [f"{tier}, as each server counts" for tier in TIERS]
    )
    first = table(("system", "requests", "hit %", *tiers, "of reusable %", "again with KV"), hits)
    second = table(("system", "TTFT mean, s", "p50", "p95", "p99"), times)
    return f"{first}\n\n{second}"


def ratio_table(
    comparison: Comparison, parts: Mapping[str, Collection[Key] | None], against: str, seed: int
) -> str:
    """TTFT of each system over that of `against`; `parts` are the requests (None: all) by the word for them."""
    rows = []
    for what, keys in parts.items():
        for name in comparison.systems:
            if name == against:
                continue
            found = ratios(comparison, against, name, keys, seed=seed)
            rows.append(
                (
                    name,
                    what,
                    f"{found['mean'].requests:,}",
                    *(f"{shown(one.value, 2)}{span(one.interval, 2)}" for one in found.values()),
                )
            )
    return table(("system", "of", "requests", "mean", "p50", "p95", "p99"), rows)


def rest_table(found: Iterable[SystemFigures]) -> str:
    """What is of the whole run: makespan, time between tokens, end to end, bytes written, errors."""
    header = (
        "system", "runs", "requests", "errors", "missing", "makespan, s", "ITL mean, ms", "ITL p99, ms",
        "end to end p99, s", "SSD written, GB",
    )  # fmt: skip
    return table(
        header,
        (
            (
                one.system,
                str(one.runs),
                f"{one.requests:,}",
                f"{one.errors:,}",
                f"{one.missing:,}",
                shown(one.makespan_s, 0),
                shown(one.itl.mean, 1, 1000),
                shown(one.itl.p99, 1, 1000),
                shown(one.end_to_end.p99, 2),
                shown(one.ssd_written_bytes, 1, 1e-9),
            )
            for one in found
        ),
    )


def span(interval: Interval | None, places: int, factor: float = 1.0) -> str:
    """ " [low, high]", or nothing."""
    if interval is None:
        return ""
    return f" [{shown(interval.low, places, factor)}, {shown(interval.high, places, factor)}]"
