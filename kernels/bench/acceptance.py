"""What the measurements have to show. Reads rows, measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]

LEAST_OF_LINK = 0.90
PACK_GB_S = 0.70 * 4300  # of what a copy within an H200 moves
MOST_GEMM_SLOWDOWN_PERCENT = {"copy engine": 2.0, "pack": 1.0}
MOST_SMALL_COPY_P95_MS = 0.2
MOST_NOISE_PERCENT = 1.0
BY_ENGINE = ("A0 loop", "A1 batch", "A2 groups", "B0 loop", "B1 batch", "B2 groups")


@dataclass(frozen=True)
class Verdict:
    """One limit. `passed` is None where there is no measurement to judge, which is not a pass."""

    name: str
    limit: str
    measured: str
    passed: bool | None

    def line(self) -> str:
        word = {True: "pass", False: "FAIL", None: "not measured"}[self.passed]
        return f"{word:<13}{self.name}: {self.measured} (limit {self.limit})"


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Judge all rows of a run. The result for `--dry-run` means nothing."""
    rows = list(rows)
    return [
        _bytes(rows),
        _link(rows, "d2h"),
        _link(rows, "h2d"),
        *(_pack(rows, encoding) for encoding in ("native", "bf16", "int8")),
        _slowdown(rows, "copy engine", "continuous", lambda path: path in BY_ENGINE),
        _slowdown(rows, "pack", "8 per second", lambda path: path.startswith("A3")),
        _small_copies(rows),
        _sanitizer(rows),
    ]


def as_json(found: Iterable[Verdict]) -> list[Row]:
    return [asdict(verdict) for verdict in found]


def _of(rows: list[Row], what: str, **values: Any) -> list[Row]:
    return [
        row for row in rows if row.get("what") == what and all(row.get(k) == v for k, v in values.items())
    ]


def _bytes(rows: list[Row]) -> Verdict:
    judged = [row for row in rows if row.get("ok") is not None and row["what"] in CHECKED]
    wrong = [row for row in judged if not row["ok"]]
    trials = _of(rows, "trial")
    text = f"{len(judged) - len(wrong)} of {len(judged)} measurements moved the right bytes"
    if wrong:
        text += f", first: {wrong[0].get('path') or wrong[0]['what']} {wrong[0].get('error', '')}".rstrip()
    return Verdict("right bytes", "all", text, not wrong if judged and trials else None)


CHECKED = ("trial", "d2h", "h2d", "fan_out", "link_bytes", "disk", "error")


def _link(rows: list[Row], way: str) -> Verdict:
    """The best way of the copy engine for fp32 records, against the best that the same link showed in step 1."""
    name = f"native records {way}, of the link's ceiling"
    ceilings = [row["gb_s"] for row in _of(rows, "link", way=way) if "gb_s" in row]
    speeds = {
        f"{row['path']} x{row['records']}": row["gb_s"]
        for row in _of(rows, way)
        if row.get("ok") and row["path"] in BY_ENGINE
    }
    if not ceilings or not speeds:
        return Verdict(name, f"{LEAST_OF_LINK:.0%}", "nothing", None)
    best = max(speeds, key=lambda path: speeds[path])
    share = speeds[best] / max(ceilings)
    text = f"{share:.1%} ({speeds[best]:.1f} of {max(ceilings):.1f} GB/s, {best})"
    return Verdict(name, f"{LEAST_OF_LINK:.0%}", text, share >= LEAST_OF_LINK)


def _pack(rows: list[Row], encoding: str) -> Verdict:
    name, limit = f"pack {encoding}", f"{PACK_GB_S:.0f} GB/s read and written"
    speeds = {row["records"]: row["gb_s"] for row in _of(rows, "pack", encoding=encoding) if "gb_s" in row}
    if not speeds:
        return Verdict(name, limit, "nothing", None)
    records = max(speeds)  # few records lie in the L2 cache from the run before
    hbm = [row["gb_s"] for row in _of(rows, "hbm")]
    beside = f", a copy within the device {max(hbm):.0f}" if hbm else ""
    text = f"{speeds[records]:.0f} GB/s for {records} records{beside}"
    return Verdict(name, limit, text, speeds[records] >= PACK_GB_S)


def _slowdown(rows: list[Row], way: str, pace: str, belongs: Callable[[str], bool]) -> Verdict:
    name, limit = f"slowdown of a matrix product beside {way}, {pace}", MOST_GEMM_SLOWDOWN_PERCENT[way]
    found = [
        row
        for row in _of(rows, "slowdown", load="gemm", pace=pace)
        if belongs(row["path"]) and "slowdown_percent" in row
    ]
    if not found:
        return Verdict(name, f"{limit} %", "nothing", None)
    worst = max(found, key=lambda row: row["slowdown_percent"])
    noise = worst["noise_percent"]
    text = f"{worst['slowdown_percent']:.2f} % ({worst['path']}; the load alone varies by {noise:.2f} %)"
    passed = worst["slowdown_percent"] <= limit
    # A load that varies by more than the limit alone proves nothing either way.
    return Verdict(name, f"{limit} %", text, passed if noise <= max(limit, MOST_NOISE_PERCENT) else None)


def _small_copies(rows: list[Row]) -> Verdict:
    name, limit = "4 KiB beside records by groups, p95", f"{MOST_SMALL_COPY_P95_MS} ms"
    rows = [row for row in rows if "error" not in row]
    found = _of(rows, "small_copy", path="A2 groups")
    if not found:
        return Verdict(name, limit, "nothing", None)
    worst = max(row["p95_ms"] for row in found)
    whole = max((row["p95_ms"] for row in _of(rows, "small_copy", path="A1 batch")), default=0.0)
    idle = max((row["p95_ms"] for row in _of(rows, "small_copy", path="nothing")), default=0.0)
    text = f"{worst:.3f} ms (beside whole records {whole:.3f}, beside nothing {idle:.3f})"
    return Verdict(name, limit, text, worst <= MOST_SMALL_COPY_P95_MS)


def _sanitizer(rows: list[Row]) -> Verdict:
    found = [row for row in _of(rows, "sanitizer") if row.get("ok") is not None]
    if not found:
        return Verdict("compute-sanitizer", "no errors", "nothing", None)
    said = ", ".join(f"{row['tool']} {'clean' if row['ok'] else row['reason'][:200]}" for row in found)
    return Verdict("compute-sanitizer", "no errors", said, all(row["ok"] for row in found))
