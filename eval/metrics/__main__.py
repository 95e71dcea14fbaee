"""``python -m eval.metrics``: print the tables of runs, write `summary.json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eval.arguments import with_examples
from eval.metrics import NotComparable, compare, load, summary, text_table
from eval.metrics.summaries import merged
from eval.records import RecordsError


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        comparisons = [compare(load([path])) for path in options.runs]
        for comparison in comparisons:
            print(text_table(comparison, options.baseline), end="\n\n")
        if options.json is not None:
            found = [summary(comparison.runs, options.baseline) for comparison in comparisons]
            options.json.parent.mkdir(parents=True, exist_ok=True)
            content = found[0] if len(found) == 1 else merged(found)
            options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except (RecordsError, NotComparable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(any(run.good for run in one.runs) for one in comparisons) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.metrics",
        description="Print hit rates and times of runs, and write them as JSON. Each RUN is compared by itself.",
        epilog="Exit code: 0 all well, 1 a RUN in which no request ended well, 2 a file is missing or no records, or the "
        "runs of one folder are not of one workload.",
    )
    with_examples(parser, "python -m eval.metrics build/eval/codex --json build/eval/summary.json")
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder with the records files (*.jsonl) of one workload, or one such file",
    )
    parser.add_argument("--baseline", metavar="NAME", help="as of eval.report")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help='write the summary of the first RUN; those of the others are in it under "others"',
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
