"""One system under one workload: build it, serve everything, leave records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eval.internal_hits import machine
from eval.records import Record, RecordWriter, RunFacts
from eval.simulate.budgets import Budgets
from eval.simulate.costs import Costs
from eval.simulate.engine import CHUNK_TOKENS, Clock, Engine
from eval.simulate.loop import ClosedLoop
from eval.simulate.systems import SYSTEMS, Tuning
from eval.workloads.sessions import Session


@dataclass(frozen=True)
class Setting:
    """Everything but the system that a run depends on. Times in seconds, lengths in tokens."""

    workload: str
    command: str = ""
    live: int = 24
    cap_s: float = 60.0
    chunk_tokens: int = CHUNK_TOKENS
    costs: Costs = field(default_factory=Costs)
    budgets: Budgets = field(default_factory=Budgets)
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class Done:
    """A run that ended, and how long it took to simulate."""

    system: str
    path: Path
    requests: int
    wall_s: float


def simulate(system: str, sessions: Sequence[Session], setting: Setting, path: Path) -> Done:
    """Serve the sessions and write `path`; equal arguments (and commit) give equal bytes.

    Raises:
        DoesNotFit: a request is larger than the device.
        ValueError: the setting makes no loop, or no chunks.
        OSError: the file cannot be written.
    """
    began = time.monotonic()
    clock = Clock()
    under_test = SYSTEMS[system].build(setting.costs, setting.budgets, clock.at, setting.tuning)
    loop = ClosedLoop(sessions, setting.live, setting.cap_s)
    records: list[Record] = []
    engine = Engine(under_test, clock, setting.costs, loop, records.append, setting.chunk_tokens)
    end_s = engine.run()
    facts = {
        "about": SYSTEMS[system].about,
        "live_sessions": setting.live,
        "pause_cap_s": setting.cap_s,
        "chunk_tokens": setting.chunk_tokens,
        "device_bytes": setting.budgets.device_bytes,
        "host_bytes": setting.budgets.host_bytes,
        "ssd_bytes": setting.budgets.ssd_bytes,
        "costs": asdict(setting.costs),
        "tuning": asdict(setting.tuning),
        "makespan_s": end_s,
        "gpu_busy_s": engine.busy_s,
        "gpu_steps": engine.steps,
        **under_test.facts(),
    }
    workload = f"{setting.workload}, {setting.live} live, pauses up to {setting.cap_s:g} s"
    run = RunFacts(system, "simulation", workload, machine.commit() or "unknown", setting.command, facts)
    with RecordWriter(path, run) as writer:
        for record in records:
            writer.add(record)
    return Done(system, path, len(records), time.monotonic() - began)
