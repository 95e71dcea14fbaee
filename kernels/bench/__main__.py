"""``python -m kernels.bench``: one run, one JSON file, at most eight minutes, on a machine with torch and nvcc.

    0 machine   1 link   2 to_host   3 to_device   4 interference   5 fragments   6 disk   7 safety   8 errors

Each step has its own time limit; what it has measured by then counts. The JSON file is written again after each step, so
a run that is cut off has left what it got. The exit status is 1 if a limit is missed, bytes are wrong or nothing could be
measured, 0 otherwise. `--dry-run` runs the same steps on the CPU at toy sizes; its figures mean nothing, and its status
is 0 if every step came to its end with the right bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import gmtime, monotonic, sleep, strftime
from typing import Any

from .. import build
from .acceptance import as_json, verdicts
from .device import COPIES
from .steps import TOTAL_S, Step, steps

CACHE = Path("build") / "kernels"
GRACE_S = 12.0  # a step may overrun by one measurement
START_S = 90.0  # of a process: torch comes from a cold disk
HANG_FACTOR = 1.25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=CACHE / "bench.json", help="the JSON file")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument("--steps", default="0,1,2,3,4,5,6,7,8", help="numbers, with commas; default: all")
    parser.add_argument(
        "--total", type=float, default=TOTAL_S, metavar="S", help=f"seconds; default {TOTAL_S}"
    )
    parser.add_argument("--library", type=Path, help="a library built before; default: built if need be")
    parser.add_argument("--folder", type=Path, help="where step 6 puts its file; default: a temporary folder")
    parser.add_argument("--one-pack", type=Path, metavar="LIBRARY", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, metavar="ROWS", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one_pack:
        return _one_pack(given.one_pack)
    try:
        numbers = sorted({int(number) for number in given.steps.split(",")})
    except ValueError:
        parser.error(f"--steps {given.steps}: numbers with commas between them")
    if given.worker:
        from .worker import work

        work(
            numbers,
            given.worker,
            given.library,
            given.folder,
            dry_run=given.dry_run,
            share=given.share,
        )
        return 0
    wanted = [step for step in steps() if step.number in numbers]
    if [step.number for step in wanted] != numbers:
        parser.error(f"--steps {given.steps}: there are steps 0 to 8")
    return _run(given, wanted)


def _run(given: argparse.Namespace, wanted: list[Step]) -> int:
    start = monotonic()
    deadline = start + given.total
    problem = _no_device() if not given.dry_run else ""
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    try:
        library = given.library or _library(given.dry_run)
    except build.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="histate-bench-") as temporary:
        rows = Path(temporary) / "rows"
        rows.touch()
        left = list(wanted)
        ends: dict[int, str] = {}
        while left and monotonic() < deadline - 1:
            _one_worker(given, left, rows, library, given.folder or Path(temporary), deadline, ends, start)
            left = [step for step in left if step.number not in ends]
        for step in left:
            ends[step.number] = "the run was out of time"
        result = _write(given, rows, ends, start, library)
    return _report(result, given.out, given.dry_run)


def _one_worker(
    given: argparse.Namespace,
    left: list[Step],
    rows: Path,
    library: Path,
    folder: Path,
    deadline: float,
    ends: dict[int, str],
    start: float,
) -> None:
    """Run a process for the steps that are left; it ends with them, or is ended at the step that hangs."""
    share = min(1.0, (deadline - monotonic()) / sum(step.limit_s for step in left))
    command = [sys.executable, "-m", "kernels.bench", "--worker", str(rows), "--share", str(share)]
    command += ["--steps", ",".join(str(step.number) for step in left), "--library", str(library)]
    command += ["--folder", str(folder), *(["--dry-run"] if given.dry_run else [])]
    process = subprocess.Popen(command, start_new_session=True)  # so that what it starts ends with it
    limits = {step.number: step.limit_s * share * HANG_FACTOR + GRACE_S for step in left}
    at, since = -1, monotonic()
    try:
        while process.poll() is None:
            sleep(0.1)
            begun = [line["step"] for line in _lines(rows) if "begin" in line and line["step"] in limits]
            if begun and begun[-1] != at:
                at, since = begun[-1], monotonic()
                _write(given, rows, ends, start, library)
            if monotonic() > deadline:
                return
            if monotonic() - since > limits.get(at, START_S) and at not in _ended(rows):
                ends[at if at >= 0 else left[0].number] = "hung, and was ended"
                return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ended = _ended(rows)
        ends |= {number: text for number, text in ended.items() if number not in ends}
    begun = [line["step"] for line in _lines(rows) if "begin" in line and line["step"] in limits]
    unfinished = [number for number in begun if number not in ends]
    if unfinished:
        ends[unfinished[-1]] = f"the process ended with status {process.returncode}"
    elif process.returncode:
        # Between two steps a fault of the step before came to light: another process does the rest. Before the first
        # one something is wrong that another process would find as well, so one step less is left each time.
        rest = [step.number for step in left if step.number not in ends]
        if rest and not begun:
            ends[rest[0]] = f"the process could not start (status {process.returncode})"


def _lines(rows: Path) -> list[dict[str, Any]]:
    found = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # half a line of a process that was ended
    return found


def _ended(rows: Path) -> dict[int, str]:
    return {line["step"]: line["end"] for line in _lines(rows) if "end" in line}


def _write(
    given: argparse.Namespace, rows: Path, ends: dict[int, str], start: float, library: Path
) -> dict[str, Any]:
    lines = _lines(rows)
    seconds = {line["step"]: line["seconds"] for line in lines if "end" in line}
    measured = [{"step": line["step"], **line["row"]} for line in lines if "row" in line]
    done = {**_ended(rows), **ends}
    built = build.read_built(library)
    result = {
        "command": "python -m kernels.bench" + (" --dry-run" if given.dry_run else ""),
        "at": strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
        "seconds": round(monotonic() - start, 1),
        "limit_s": given.total,
        "sources": build.source_hash(),
        "compiler": built.compiler if built else None,
        "steps": [
            {
                "step": step.number,
                "name": step.name,
                "end": done.get(step.number),
                "seconds": seconds.get(step.number),
            }
            for step in steps()
            if step.number in done
        ],
        "verdicts": as_json(verdicts(measured)),
        "rows": measured,
    }
    beside = given.out.with_suffix(".partial")
    beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    beside.replace(given.out)
    return result


def _report(result: dict[str, Any], out: Path, dry_run: bool) -> int:
    for step in result["steps"]:
        print(f"step {step['step']} {step['name']:<13} {step['seconds'] or '-':>8} s  {step['end']}")
    found = verdicts(result["rows"])
    for verdict in found:
        print(verdict.line())
    print(f"{out}: {len(result['rows'])} measurements in {result['seconds']} s")
    if dry_run:
        broken = [step for step in result["steps"] if step["end"] not in ("done", "out of time")]
        print("a dry run: the figures mean nothing")
        return 1 if broken or not found[0].passed else 0
    return 1 if not result["rows"] or any(verdict.passed is False for verdict in found) else 0


def _no_device() -> str:
    import torch

    return (
        ""
        if torch.cuda.is_available()
        else "there is no GPU here; --dry-run goes through the steps on the CPU"
    )


def _library(dry_run: bool) -> Path:
    """Return the kernels and the bench's copies in one library, for the GPU at hand or for the CPU."""
    if dry_run:
        return build.build_host(CACHE / "bench-host.so", with_sources=(COPIES,))
    import torch

    arch = "".join(map(str, torch.cuda.get_device_capability()))
    return build.build(CACHE / f"bench-sm_{arch}.so", (arch,), ffi=False, with_sources=(COPIES,)).path


def _one_pack(library: Path) -> int:
    """Pack one record as int8 twice, for ncu."""
    import torch

    from sglang_histate.config import CheckpointDtype

    from .device import Device
    from .scale import Scale, States

    device = Device(library, dry_run=not torch.cuda.is_available(), repeats=1, warmups=0)
    states = States(device, Scale(slots=4))
    size = states.size_of(CheckpointDtype.INT8)
    records = torch.empty((4, size), dtype=torch.uint8, device=device.torch)
    for _ in range(2):
        device.kernels.pack(states.pool, range(4), records, CheckpointDtype.INT8)
    device.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
