"""For `eval.metrics_overhead` only: SIGUSR2 turns a scheduler's metrics and explanations off, and the next one on again.

Python imports a module of this name by itself where its folder is on PYTHONPATH. Two servers of one kind differ by more
than what is to be measured, so one process is asked with both and without.
"""

from __future__ import annotations

import gc
import signal
from typing import Any


class _Switch:
    def __init__(self) -> None:
        self._found: list[Any] | None = None
        self._kept: list[tuple[Any, str, Any]] = []

    def __call__(self, number: int, frame: object) -> None:
        if self._kept:
            for owner, name, value in self._kept:
                setattr(owner, name, value)
            self._kept = []
            return
        if self._found is None:
            gc.unfreeze()  # SGLang has frozen what was there when it became ready: out of the collector's sight
            kinds = {"HiStateCache": ("explanations", "metrics"), "Distribution": ("heard",)}
            self._found = [
                (one, name)
                for one in gc.get_objects()
                if str(type(one).__module__).startswith("sglang_histate.")
                for name in kinds.get(type(one).__name__, ())
                if getattr(one, name) is not None
            ]
            gc.freeze()
        for owner, name in self._found:
            self._kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, None)


signal.signal(signal.SIGUSR2, _Switch())
