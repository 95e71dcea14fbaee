"""``python -m eval.replay.quick``: HiState against HiCache on the demo model in ten minutes on two cores.

Real Claude Code sessions if they are beside the repository, else the synthetic rewriting ones. Both systems are run
twice, first and second, if the time allows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eval.arguments import with_examples
from eval.replay.__main__ import main as replay
from eval.replay.workload import TRACES, WEKA

DEFAULT_DIR = Path("build/eval-quick")
MINUTES = 9.5
SYSTEMS = "histate,hicache"
_REAL = (
    *("--workload", "weka"),
    *("--sessions", "36"),
    *("--least-turns", "3"),
    *("--context", "65536"),
    *("--turns", "12"),
    *("--live", "7"),
)
_SYNTHETIC = (
    *("--workload", "rewriting:10"),
    *("--context", "65536"),
    *("--live", "6"),
)
_COMMON = (
    *("--repeats", "2"),
    *("--running", "4"),
    *("--ramp", "10"),
)


def arguments(out: Path, traces: Path, minutes: float, systems: str = SYSTEMS) -> list[str]:
    """Return the command line of `eval.replay`."""
    chosen = (*_REAL, "--traces", str(traces)) if (traces / WEKA).exists() else _SYNTHETIC
    return [*chosen, *_COMMON, "--systems", systems, "--minutes", f"{minutes:g}", "--out", str(out)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.replay.quick",
        description="Compares HiState with HiCache on the demo model, in about ten minutes on two cores.",
        epilog="Exit code as of python -m eval.replay.",
    )
    with_examples(parser, "python -m eval.replay.quick --out build/eval-quick")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_DIR, metavar="DIR", help="records and summary.json (%(default)s)"
    )
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help=f"folder with {WEKA}")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="M",
        help="begin no round that ends later (%(default)s)",
    )
    parser.add_argument(
        "--systems", default=SYSTEMS, metavar="A,B", help="as of python -m eval.replay (%(default)s)"
    )
    given = parser.parse_args(argv)
    return replay(arguments(given.out, given.traces, given.minutes, given.systems))


if __name__ == "__main__":
    sys.exit(main())
