"""Measures the scheduler thread of the server that starts with this folder on PYTHONPATH.

Python imports this module at the start of every process; it does something only in one that imports SGLang's
scheduler. It adds up the thread's CPU time in four parts of the scheduler's loop and writes the sums, as JSON, to the
file that HISTATE_PROBE_FILE names, whenever the scheduler has become idle after new requests.

    receive    take in requests
    schedule   choose the next batch: matching, admission, eviction, everything HiState does once per step
    launch     the rest of `run_batch`, without the model's forward pass
    finish     process a batch's results: publish KV and states, answer
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner"
PARTS = {
    "receive": "ingest_requests",
    "schedule": "get_next_batch_to_run",
    "launch": "run_batch",
    "finish": "process_batch_result",
}

sums_ns: dict[str, int] = {}
counts: dict[str, int] = {}
_forward_ns = 0


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the thread's CPU time of each call to `part`, less what the model took in it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _forward_ns
        outer, _forward_ns = _forward_ns, 0
        start = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            sums_ns[part] = sums_ns.get(part, 0) + time.thread_time_ns() - start - _forward_ns
            counts[part] = counts.get(part, 0) + 1
            _forward_ns = outer

    return call


def forward(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _forward_ns
        start = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            _forward_ns += time.thread_time_ns() - start

    return call


def writing(idle: Callable[..., Any], file: Path) -> Callable[..., Any]:
    written: dict[str, int] = {}

    @functools.wraps(idle)
    def call(*args: Any, **kwargs: Any) -> Any:
        if written.get("finish") != counts.get("finish"):
            written.update(counts)
            aside = file.with_suffix(".new")
            aside.write_text(
                json.dumps({"ns": sums_ns, "calls": counts, "thread": threading.current_thread().name})
            )
            aside.replace(file)
        return idle(*args, **kwargs)

    return call


def instrument(module: Any, file: Path) -> None:
    if module.__name__ == RUNNER:
        module.ModelRunner.forward = forward(module.ModelRunner.forward)
        return
    scheduler = module.Scheduler
    for part, name in PARTS.items():
        setattr(scheduler, name, timed(part, getattr(scheduler, name)))
    scheduler.on_idle = writing(scheduler.on_idle, file)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the two modules and adds to what their loader does."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in (SCHEDULER, RUNNER) or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_instrument(module: Any) -> None:
            load(module)
            instrument(module, self._file)

        spec.loader.exec_module = load_and_instrument  # type: ignore[method-assign]
        return spec


if "HISTATE_PROBE_FILE" in os.environ:
    sys.meta_path.insert(0, _Finder(Path(os.environ["HISTATE_PROBE_FILE"])))
