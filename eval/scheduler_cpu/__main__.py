"""``python -m eval.scheduler_cpu``: CPU time of the scheduler thread per request, HiState beside stock SGLang.

All systems run side by side. Every one gets the same agent sessions, one request at a time, each with more tokens than
the one before, on pools too small for all of them, so that matching, capture, backup, eviction and restore all happen.
The model's forward pass is left out. The first sessions of each system are not counted: imports and caches warm up.

With the same two device pools HiState is to take at most 1.1 times what stock HiCache takes; exit status 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import positive, with_examples
from eval.internal_hits import machine
from eval.internal_hits.budgets import Budgets
from eval.internal_hits.systems import HICACHE, HISTATE, STOCK, Running, Setup, command_line, disk_dir
from eval.progress import each
from eval.servers import Server

PARTS = ("receive", "schedule", "launch", "finish")
PROBE = Path(__file__).parent / "probe"
SPLIT = "histate-split"
SYSTEMS = {
    HICACHE: "stock HiCache, host tier and file tier, Python tree core",
    SPLIT: "HiState with two fixed shares of the device, as HiCache has them",
    HISTATE: "HiState as it is by default: one device pool, SGLang's unified memory, which costs a translation per step",
    STOCK: "stock caching on the device only",
}
TARGET = 1.1
TURNS = 16
TURN_TOKENS = (100, 400)  # at least and at most; few prompts end on a page, as in life
_WAKE_S = 1.5  # a sleeping scheduler wakes every second
BUDGETS = Budgets(
    device_kv_tokens=8192, device_states=24, host_ratio=2.0, inflight_bytes=16 << 20, disk_bytes=64 << 20
)


@dataclass(frozen=True)
class Result:
    """Microseconds of the scheduler thread by part, over all counted requests."""

    system: str
    requests: int
    cached_tokens: int
    prompt_tokens: int
    us: dict[str, float]
    steps: int

    @property
    def per_request(self) -> float:
        return sum(self.us.values()) / self.requests

    def row(self, reference: float) -> str:
        parts = "".join(f"{self.us[part] / self.requests:>10.0f}" for part in PARTS)
        return (
            f"{self.system:<10}{self.requests:>9}{self.cached_tokens / self.prompt_tokens:>8.3f}{self.steps:>8}{parts}"
            f"{self.per_request:>10.0f}{self.per_request / reference:>8.3f}"
        )


def sessions(count: int, seed: int) -> list[list[list[int]]]:
    """Return the prompts of each session."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        whole: list[int] = []
        prompts = []
        for _ in range(TURNS):
            whole += [draw.randrange(256) for _ in range(draw.randint(*TURN_TOKENS))]
            prompts.append(list(whole))
        found.append(prompts)
    return found


def in_order(prompts: list[list[list[int]]], live: int) -> list[list[int]]:
    """Return the prompts in order: `live` sessions at a time take turns."""
    ordered = []
    for first in range(0, len(prompts), live):
        for turn in range(TURNS):
            ordered += [session[turn] for session in prompts[first : first + live]]
    return ordered


def measure(
    names: list[str], work: Path, count: int, live: int, output_tokens: int, seed: int
) -> list[Result]:
    """Start the systems side by side, send each request to all of them in turn, and return what their schedulers took.

    So whatever else disturbs the machine disturbs all of them.

    Raises:
        ServerFailed: one did not start.
    """
    with ExitStack() as stack:
        started = [_start(name, work, stack) for name in names]
        for prompt in in_order(sessions(live, seed + 1), live):
            for one in started:
                one.ask(prompt, output_tokens)
        time.sleep(_WAKE_S)
        before = [_read(work, name) for name in names]
        counted = in_order(sessions(count, seed), live)
        cached = dict.fromkeys(names, 0)
        for number, prompt in enumerate(each(counted, "measure", "request")):
            for one in started if number % 2 == 0 else started[::-1]:
                cached[one.name] += one.ask(prompt, output_tokens).cached.total
        time.sleep(_WAKE_S)
        after = [_read(work, name) for name in names]
    return [
        Result(
            name,
            len(counted),
            cached[name],
            sum(map(len, counted)),
            {part: (new["ns"][part] - old["ns"][part]) / 1000 for part in PARTS},
            new["calls"]["finish"] - old["calls"]["finish"],
        )
        for name, old, new in zip(names, before, after, strict=True)
    ]


def _start(name: str, work: Path, stack: ExitStack) -> Running:
    extra = ("--histate-static-split",) if name == SPLIT else ()
    setup = Setup(None, None, BUDGETS, work / name, extra=extra)
    system = HISTATE if name == SPLIT else name
    folder = disk_dir(system, setup)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    arguments, environ = command_line(system, setup)
    file = _probe_file(work, name)
    file.unlink(missing_ok=True)
    environ |= {"PYTHONPATH": str(PROBE), "HISTATE_PROBE_FILE": str(file), "OMP_WAIT_POLICY": "PASSIVE"}
    server = stack.enter_context(Server(arguments, work / f"{name}.log", environ)).wait_ready()
    return Running(name, setup, server)


def _probe_file(work: Path, name: str) -> Path:
    return work.resolve() / f"{name}.probe.json"


def _read(work: Path, name: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(_probe_file(work, name).read_text())
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.scheduler_cpu", description=__doc__.partition("\n\n")[2]
    )
    with_examples(parser, "python -m eval.scheduler_cpu --rounds 2")
    parser.add_argument("--sessions", type=positive, default=24, help=f"of {TURNS} turns each (%(default)s)")
    parser.add_argument("--live", type=positive, default=8, help="sessions that take turns (%(default)s)")
    parser.add_argument(
        "--output-tokens",
        type=positive,
        default=216,
        metavar="N",
        help="of every answer (%(default)s, the median of recorded coding agents); each one is a step of the scheduler",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=2,
        help="starts of all systems, the order reversed each time (%(default)s)",
    )
    parser.add_argument(
        "--systems",
        default=",".join((HICACHE, SPLIT, HISTATE)),
        help="; ".join(f"{name}: {text}" for name, text in SYSTEMS.items()),
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/scheduler_cpu"),
        help="logs, SSDs and summary.json (%(default)s)",
    )
    given = parser.parse_args(argv)
    names = given.systems.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        parser.error(f"--systems: {unknown[0]!r} is none of {', '.join(SYSTEMS)}")
    given.work_dir.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for round_number in range(given.rounds):
        ordered = names if round_number % 2 == 0 else names[::-1]
        results += measure(
            ordered, given.work_dir, given.sessions, given.live, given.output_tokens, seed=round_number * 1000
        )
        print(f"round {round_number + 1} of {given.rounds} measured", flush=True)
    totals = {name: _mean([one for one in results if one.system == name]) for name in names}
    reference = totals.get(HICACHE, totals[names[0]])
    print("\nmicroseconds per request; ratio to", HICACHE if HICACHE in totals else names[0])
    print(
        f"{'system':<10}{'requests':>9}{'cached':>8}{'steps':>8}{''.join(f'{part:>10}' for part in PARTS)}{'all':>10}{'ratio':>8}"
    )
    for result in totals.values():
        print(result.row(reference.per_request))
    summary = {
        "machine": machine.describe(),
        "systems": {
            r.system: {"us_per_request": r.per_request, "parts_us": r.us, "requests": r.requests}
            for r in totals.values()
        },
    }
    (given.work_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if SPLIT in totals and HICACHE in totals:
        return int(totals[SPLIT].per_request > TARGET * totals[HICACHE].per_request)
    return 0


def _mean(runs: list[Result]) -> Result:
    us = {part: sum(run.us[part] for run in runs) for part in PARTS}
    return Result(
        runs[0].system,
        sum(run.requests for run in runs),
        sum(run.cached_tokens for run in runs),
        sum(run.prompt_tokens for run in runs),
        us,
        sum(run.steps for run in runs),
    )


if __name__ == "__main__":
    sys.exit(main())
