"""The command line of ``python -m eval.simulate``."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import positive, size_bytes, with_examples
from eval.simulate.budgets import Budgets
from eval.simulate.cost_flag import HELP as COST_HELP
from eval.simulate.cost_flag import constant
from eval.simulate.costs import Costs
from eval.simulate.engine import CHUNK_TOKENS
from eval.simulate.inputs import NAMED, TRACES, Workload
from eval.simulate.run import Setting
from eval.simulate.systems import SYSTEMS, Tuning
from eval.workloads.load import FORMATS
from eval.workloads.rewriting import After, Depth
from eval.workloads.select import HELP as SELECT_HELP
from eval.workloads.tracelab import Reading
from sglang_histate.sizes import format_size

_EPILOG = (
    "Exit code: 0 all well, 1 a system failed, 2 the command line or the workload is wrong. Every system gets the same "
    "requests and the same bytes; DIR gets one records file each, which eval.report and eval.metrics read."
)


@dataclass(frozen=True)
class Options:
    """What to simulate."""

    workload: Workload
    systems: tuple[str, ...]
    setting: Setting
    out: Path
    jobs: int


def parse(argv: list[str]) -> Options:
    """Return the options; an error ends the process with 2 and a sentence that names the flag."""
    parser = _parser()
    given = parser.parse_args(argv)
    systems = tuple(dict.fromkeys(given.systems.split(",")))
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        parser.error(f"--systems: {unknown[0]} is none of {', '.join(SYSTEMS)}")
    if given.half:
        given.device, given.cpu, given.ssd = given.device // 2, given.cpu // 2, given.ssd // 2
    try:
        workload = Workload(
            given.workload,
            given.traces,
            given.format,
            given.select,
            given.shared_prefix,
            given.share / 100,
            Depth(given.depth),
            After(given.after),
            Reading(given.reading),
            given.seed,
        )
        setting = Setting(
            workload=workload.name,
            command=" ".join(["python -m eval.simulate", *argv]),
            live=given.live,
            cap_s=given.cap,
            chunk_tokens=given.chunk,
            costs=Costs(**dict(given.cost)),
            budgets=Budgets(given.device, given.cpu, given.ssd),
            tuning=Tuning(given.tau, given.marconi_alpha, given.write_rate),
        )
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return Options(workload, systems, setting, given.out, given.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.simulate",
        description="Serve sessions with different prefix caches on a simulated GPU. HiState's decisions are those of "
        "the server: the same code makes them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    with_examples(
        parser,
        "python -m eval.simulate --workload codex --systems histate,hicache,infinite --out build/eval/codex",
        "python -m eval.simulate --workload trace.jsonl --device 40GiB --cpu 200GiB --ssd 1TiB --out build/eval/mine",
    )
    what = parser.add_argument_group("requests")
    what.add_argument(
        "--workload",
        required=True,
        metavar="NAME|FILE",
        help="; ".join(f"{name}: {about}" for name, about in NAMED.items())
        + "; or a recorded file or folder",
    )
    what.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="where named traces are")
    what.add_argument("--format", choices=FORMATS, help="of the file (found out from its first line)")
    what.add_argument("--select", default="", metavar="STEPS", help=SELECT_HELP)
    what.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="let the sessions' first TOKENS be the same text (0: sessions share nothing)",
    )
    what.add_argument(
        "--share", type=_percent, default=10.0, metavar="PERCENT", help="of rewriting requests (10)"
    )
    what.add_argument("--depth", choices=[one.value for one in Depth], default=Depth.UNIFORM.value)
    what.add_argument("--after", choices=[one.value for one in After], default=After.DISCARD.value)
    what.add_argument("--reading", choices=[one.value for one in Reading], default=Reading.GROWTH.value)
    what.add_argument("--seed", type=int, default=0, help="of made workloads (0)")
    what.add_argument("--live", type=positive, default=24, help="sessions at a time (24)")
    what.add_argument("--cap", type=_seconds, default=60.0, metavar="S", help="longest pause, seconds (60)")
    under = parser.add_argument_group("systems")
    under.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        metavar="A,B",
        help="all, or some of "
        + "; ".join(f"{name}: {recipe.about}" for name, recipe in SYSTEMS.items()).replace("%", "%%"),
    )
    budgets = Budgets()
    for flag, default, about in (
        ("--device", budgets.device_bytes, "GPU memory for prefixes and running requests"),
        ("--cpu", budgets.host_bytes, "host memory"),
        ("--ssd", budgets.ssd_bytes, "disk"),
    ):
        under.add_argument(
            flag,
            type=size_bytes,
            default=default,
            metavar="SIZE",
            help=f"{about} ({format_size(default)})",
        )
    under.add_argument("--half", action="store_true", help="half of each of these")
    tuning = Tuning()
    under.add_argument("--tau", type=float, default=tuning.tau, help=f"of HiState's score ({tuning.tau:g})")
    under.add_argument(
        "--marconi-alpha",
        type=float,
        default=tuning.marconi_alpha,
        help=f"weight of FLOP efficiency against recency ({tuning.marconi_alpha:g}); 0 is LRU",
    )
    under.add_argument(
        "--write-rate",
        type=_rate,
        default=tuning.write_rate,
        metavar="SIZE",
        help="bytes per second that HiState writes to the disk at most, as --histate-ssd-write-rate; what a checkpoint has to "
        "save rises as they run out (unlimited)",
    )
    model = parser.add_argument_group("machine")
    model.add_argument(
        "--chunk",
        type=positive,
        default=CHUNK_TOKENS,
        help=f"prompt tokens of a step ({CHUNK_TOKENS})",
    )
    model.add_argument(
        "--cost",
        type=constant,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a constant of the cost model; may be repeated. " + COST_HELP,
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the records files, SYSTEM.jsonl each",
    )
    run.add_argument(
        "--jobs",
        type=positive,
        default=os.cpu_count() or 1,
        help="systems at the same time (the number of cores)",
    )
    return parser


def _rate(text: str) -> int | None:
    return None if text == "unlimited" else size_bytes(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds")
    return value


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is no share in percent")
    return value
