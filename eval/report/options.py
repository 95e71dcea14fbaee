"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.arguments import with_examples
from eval.metrics.bootstrap import SEED


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m eval.report",
        description="Write tables (Markdown) and plots (PNG) of runs of one workload.",
        epilog="Exit code: 0 written, 1 no request of any run ended well (written all the same), 2 a file, an option or "
        "matplotlib is missing or wrong, or the runs are not of one workload.",
    )
    with_examples(made, "python -m eval.report build/eval/codex --name codex --out build/eval/report")
    made.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a records file that a run of the simulator or of the replay wrote, or a folder of them (all *.jsonl below it)",
    )
    made.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="folder to write to (default: docs/results)"
    )
    made.add_argument(
        "--name", help="how the files' names begin (default: the workload's name and the source)"
    )
    made.add_argument(
        "--baseline",
        metavar="NAME",
        help="the system whose misses make a request reuse-sensitive (default: vllm-disk in simulation, as in the paper; "
        "hicache on the engine)",
    )
    made.add_argument(
        "--seed", type=int, default=SEED, help="of the resampling (default: 1): same seed, same intervals"
    )
    made.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return made
