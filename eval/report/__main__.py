"""``python -m eval.report``: see options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eval.metrics import Comparison, NotComparable, Sensitive, compare, load, sensitive
from eval.records import RecordsError
from eval.report.document import page, short_name
from eval.report.options import parser
from eval.report.paths import without_paths

if TYPE_CHECKING:  # matplotlib may be missing
    from eval.report.plots import Plot


class Refused(ValueError):
    """An option that cannot be met, in one sentence."""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(given)
    command = without_paths(shlex.join(["python", "-m", "eval.report", *given]))
    try:
        comparison = compare(load(options.runs))
        name = _name(options.name, comparison)
        chosen = _sensitive(comparison, options.baseline)
        plots: list[Plot] = []
        if not options.no_plots:
            plots = _write_plots(comparison, chosen, options.out, name, command)
        path = options.out / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(comparison, chosen, plots, command, options.seed), encoding="utf-8")
    except (RecordsError, NotComparable, Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in (path, *(options.out / plot.file for plot in plots)):
        print(file)
    if not any(run.good for run in comparison.runs):
        print("no request of any run ended well: the report has no figures", file=sys.stderr)
        return 1
    return 0


def _name(named: str | None, comparison: Comparison) -> str:
    if named is None:
        return (
            re.sub(r"[^\w.]+", "-", f"{short_name(comparison.workload)}-{comparison.source}").strip("-.")
            or "report"
        )
    if Path(named).name != named or named.startswith("."):
        raise Refused(f"--name {named}: not a file name: give one without folders, --out is the folder")
    return named


def _sensitive(comparison: Comparison, baseline: str | None) -> Sensitive:
    if baseline is not None and baseline not in comparison.systems:
        raise Refused(
            f"--baseline {baseline}: there is no run of it: choose one of {', '.join(comparison.systems)}"
        )
    return sensitive(comparison, baseline)


def _write_plots(
    comparison: Comparison, chosen: Sensitive, folder: Path, name: str, command: str
) -> list[Plot]:
    try:
        from eval.report.plots import write_all
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise Refused(
            "plots need matplotlib: pip install 'sglang-histate[eval]', or give --no-plots"
        ) from None
    return write_all(comparison, chosen, folder, name, command)


if __name__ == "__main__":
    sys.exit(main())
