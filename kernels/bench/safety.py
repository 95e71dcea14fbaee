"""Step 7: compute-sanitizer on the long trial, and how much of HBM the int8 kernel uses, as ncu sees it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from .. import trial
from .steps import Bench

METRIC = "dram__throughput.avg.pct_of_peak_sustained_elapsed"


def run(bench: Bench) -> None:
    if bench.device.dry_run:
        bench.row(what="sanitizer", tool="memcheck", ok=None, reason="a dry run has no GPU")
        bench.row(what="ncu", percent_of_hbm=None, reason="a dry run has no GPU")
        return
    for tool, timeout_s in (("memcheck", 30.0), ("racecheck", 20.0)):
        clean, said = trial.sanitize(tool, bench.library, timeout_s)
        bench.row(what="sanitizer", tool=tool, ok=clean, reason=said[-1000:])
        if tool == "memcheck":
            percent, reason = _ncu(bench)
            bench.row(what="ncu", percent_of_hbm=percent, reason=reason)


def _ncu(bench: Bench) -> tuple[float | None, str]:
    if shutil.which("ncu") is None:
        return None, "ncu is not installed"
    command = ["ncu", "--clock-control", "none", "--metrics", METRIC, "--launch-count", "1"]
    command += ["--kernel-name", "regex:pack_int8_tile", sys.executable, "-m", "kernels.bench"]
    command += ["--one-pack", str(bench.library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, type(error).__name__
    found = re.search(rf"{re.escape(METRIC)}\s+%\s+([\d.]+)", done.stdout)
    return (float(found[1]), "") if found else (None, (done.stdout + done.stderr)[-500:])
