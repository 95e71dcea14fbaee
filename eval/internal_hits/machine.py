"""What the figures were measured on, and how much CPU time a server used."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_TICKS_PER_S = 100.0  # USER_HZ of every Linux


def describe() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_value(Path("/proc/meminfo"), "MemTotal"),
        "gpu": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the short name of this source's commit, None outside a repository."""
    return _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def load() -> float:
    """Return the mean number of runnable processes over the last minute: far above the cores means noisy times."""
    return round(os.getloadavg()[0], 1)


def text(facts: dict[str, Any]) -> str:
    device = facts["gpu"] or "no GPU"
    return (
        f"{facts['cpu'] or 'unknown CPU'}, {facts['cores']} cores, {facts['memory']}, {device}, {facts['system']}, "
        f"sglang {facts['sglang']}, torch {facts['torch']}"
    )


def cpu_seconds(group: int, proc: Path = Path("/proc")) -> float | None:
    """Return the CPU time used so far by the live processes of a process group; None where /proc has none."""
    total, found = 0.0, False
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended while we looked
            continue
        if int(fields[2]) == group:
            total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
            found = True
    return total if found else None


def _first_value(file: Path, name: str) -> str | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
