"""The table on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from eval.internal_hits.cases import CASES, ZERO_REUSE, ZERO_REUSE_TITLE
from eval.internal_hits.records import Record
from eval.internal_hits.systems import DESCRIPTIONS
from eval.internal_hits.zero_reuse import Ratio

HEADER = tuple(
    [
        "request",
        "system",
        "prompt",
        "reusable",
        "cached",
        "device",
        "host",
        "storage",
        "via-SSD",
        "TTFT-ms",
        "CPU-ms",
    ]
)
_TEXT_COLUMNS = 2
_SYSTEMS = tuple(DESCRIPTIONS)


def case_table(records: Sequence[Record]) -> str:
    """Return every measured request by case and row, one line a system; "via-SSD" is part of the tiers before it.

    Requests of one row, from repeats or within a case, are one line: tokens as means, times as medians. CPU time is that of the whole
    server, from the request to a moment after its last token.
    """
    groups: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        if record.reusable is not None and record.case != ZERO_REUSE:
            groups.setdefault((record.case, record.row), {}).setdefault(record.system, []).append(record)
    lines: list[tuple[str, ...] | str] = []
    for case in CASES:
        rows = {row: systems for (key, row), systems in groups.items() if key == case.key}
        if rows:
            lines.append(f"{case.key}. {case.title}")
        for row, systems in rows.items():
            ordered = sorted(systems.items(), key=lambda item: _SYSTEMS.index(item[0]))
            for number, (system, same) in enumerate(ordered):
                lines.append(_line(row if number == 0 else "", system, same))
    return layout(HEADER, lines) if lines else ""


def _line(row: str, system: str, records: list[Record]) -> tuple[str, ...]:
    cached = [record.cached for record in records]
    cpu = [record.cpu_s for record in records]
    tokens = (
        mean(record.prompt_tokens for record in records),
        mean(record.reusable or 0 for record in records),
        mean(c.total for c in cached),
        mean(c.device for c in cached),
        mean(c.host for c in cached),
        mean(c.storage for c in cached),
        mean(c.ssd_checkpoint for c in cached),
    )
    return (
        row,
        system,
        *(f"{value:.0f}" for value in tokens),
        f"{1000 * median(r.ttft_s for r in records):.0f}",
        "-" if None in cpu else f"{1000 * median(s for s in cpu if s is not None):.0f}",
    )


def ratio_table(ratios: Sequence[Ratio]) -> str:
    """Return the zero-reuse ratios, HiState over the other; last, with HiState started first and second."""
    lines: list[tuple[str, ...] | str] = (
        [f"{ZERO_REUSE}. {ZERO_REUSE_TITLE}: HiState / other"] if ratios else []
    )
    for ratio in ratios:
        lines.append(
            (
                f"{ratio.length} new tokens",
                ratio.against,
                "TTFT" if ratio.unit == "ttft" else "CPU time",
                str(ratio.pairs),
                f"{1000 * ratio.histate_median_s:.0f}",
                f"{1000 * ratio.other_median_s:.0f}",
                f"{ratio.ratio:.3f}",
                f"{ratio.low:.3f}",
                f"{ratio.high:.3f}",
                " ".join(f"{one:.3f}" for one in ratio.by_order),
            )
        )
    header = (
        "request",
        "other",
        "of",
        "pairs",
        "HiState ms",
        "other ms",
        "ratio",
        "95% from",
        "to",
        "first/second up",
    )
    return layout(header, lines, text_columns=3) if lines else ""


def layout(
    header: tuple[str, ...], lines: Sequence[tuple[str, ...] | str], text_columns: int = _TEXT_COLUMNS
) -> str:
    """Align columns: the first ones to the left, numbers to the right. A plain string is a heading of its own."""
    rows = [header, *(line for line in lines if not isinstance(line, str))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]

    def text(row: tuple[str, ...]) -> str:
        cells = [
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [text(header), *(f"\n{line}" if isinstance(line, str) else text(line) for line in lines)]
    )
