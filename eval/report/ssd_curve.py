"""``python -m eval.report.ssd_curve``: what is reused, over the size of the SSD; one line a system, one column a host size."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import with_examples
from eval.metrics import NotComparable, compare, figures, load, sensitive
from eval.metrics.table import shown
from eval.records import RecordsError
from eval.report.paths import without_paths
from eval.report.tables import table

GIB = 1 << 30


@dataclass(frozen=True)
class Point:
    """One system at one pair of sizes, bytes. Shares of 1, of what an infinite cache reuses; None of nothing."""

    host_bytes: int
    ssd_bytes: int
    system: str
    all_share: float | None
    sensitive_share: float | None


class Refused(ValueError):
    """The folders make no curve, in one sentence."""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(given)
    command = without_paths(shlex.join(["python", "-m", "eval.report.ssd_curve", *given]))
    try:
        points = [point for folder in options.runs for point in read(folder)]
        path = options.out / f"{options.name}.png"
        draw(points, path, command)
    except (RecordsError, NotComparable, Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(points))
    print(f"\n{path}")
    return 0


def read(folder: Path) -> list[Point]:
    """Return the points of one setting: a folder that `eval.simulate` has written.

    Raises:
        Refused: its runs do not tell the sizes.
        RecordsError, NotComparable, OSError: as of `load` and `compare`.
    """
    comparison = compare(load([folder]))
    facts = comparison.runs[0].facts.facts  # `compare` has seen that all are of one setting
    host, ssd = facts.get("host_bytes"), facts.get("ssd_bytes")
    if not isinstance(host, int) or not isinstance(ssd, int):
        raise Refused(f"{folder}: its runs tell no size of host and SSD: name folders of eval.simulate")
    found = figures(comparison, sensitive(comparison))
    return [
        Point(
            host,
            ssd,
            name,
            one.all.reusable_share,
            None if one.sensitive is None else one.sensitive.reusable_share,
        )
        for name, one in found.items()
        if name != "infinite"
    ]


def markdown(points: Sequence[Point]) -> str:
    """A row for each pair of sizes; each system has "share of all / of the reuse-sensitive requests", in percent."""
    systems = list(dict.fromkeys(point.system for point in points))
    cells = {(point.host_bytes, point.ssd_bytes, point.system): point for point in points}
    rows = []
    for host, ssd in sorted({(point.host_bytes, point.ssd_bytes) for point in points}):
        row = [f"{host / GIB:g}", f"{ssd / GIB:g}"]
        for system in systems:
            point = cells.get((host, ssd, system))
            row.append(
                "-"
                if point is None
                else f"{shown(point.all_share, 1, 100)} / {shown(point.sensitive_share, 1, 100)}"
            )
        rows.append(row)
    return table(("host, GiB", "SSD, GiB", *systems), rows)


def draw(points: Sequence[Point], path: Path, command: str) -> None:
    """Write the plot: above all requests, below the reuse-sensitive ones of each setting.

    Raises:
        Refused: matplotlib is not installed.
    """
    try:
        from eval.report import style
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise Refused("plots need matplotlib: pip install 'sglang-histate[eval]'") from None
    hosts = sorted({point.host_bytes for point in points})
    made, axes = style.figure(4.6 * len(hosts), 6.4, rows=2, columns=len(hosts), sharex=True, sharey="row")
    for column, host in enumerate(hosts):
        here = sorted((point for point in points if point.host_bytes == host), key=lambda one: one.ssd_bytes)
        for row, what in enumerate(("all requests", "reuse-sensitive requests")):
            each = axes[row, column]
            for system in dict.fromkeys(point.system for point in points):
                line = [
                    (point.ssd_bytes / GIB, 100 * share)
                    for point in here
                    if point.system == system
                    and (share := point.sensitive_share if row else point.all_share) is not None
                ]
                if line:
                    each.plot(
                        *zip(*line, strict=True), marker="o", markersize=3, label=system, **style.line(system)
                    )
            style.finish(
                each, f"host {host / GIB:g} GiB, {what}", "SSD, GiB" if row else "", "reused of reusable, %"
            )
    style.save(made, path, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report.ssd_curve",
        description="Plot (PNG) and print (Markdown) what systems reuse over the size of the SSD.",
        epilog="Exit code: 0 written, 2 a file is missing or wrong, or matplotlib is.",
    )
    with_examples(
        parser, "python -m eval.report.ssd_curve build/eval/curve/* --name ssd-curve --out build/eval/report"
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder of eval.simulate: one size of host and SSD",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="folder to write to (docs/results)"
    )
    parser.add_argument("--name", default="ssd-curve", help="name of the PNG (ssd-curve)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
