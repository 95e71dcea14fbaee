"""The process that measures: it runs steps one after the other and writes each row to a file as it has it.

A step that fails or runs out of time ends itself. One that hangs or kills the process (a fault of the GPU ends everything
that the process could still do) is for `__main__`, which starts another worker behind that step.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TextIO

import torch

from .device import Device
from .steps import Bench, OutOfTime, scale_of, steps


def work(numbers: list[int], out: Path, library: Path, folder: Path, *, dry_run: bool, share: float) -> None:
    """Run the steps in `numbers`; each gets `share` of its own limit."""
    if dry_run:
        torch.set_num_threads(1)
    scale = scale_of(dry_run)
    device = Device(library, dry_run=dry_run, repeats=scale.repeats, warmups=scale.warmups)
    with out.open("a", encoding="utf-8") as file:
        for step in steps():
            if step.number not in numbers:
                continue
            _line(file, step=step.number, begin=step.name)
            start = perf_counter()

            def emit(row: dict[str, Any], number: int = step.number) -> None:
                _line(file, step=number, row=row)

            bench = Bench(device, scale, folder, library, emit, monotonic() + step.limit_s * share)
            ended = "done"
            try:
                step.run(bench)
            except OutOfTime:
                ended = "out of time"
            except Exception as error:  # the steps behind it are still worth running
                ended = f"{type(error).__name__}: {error}"[:500]
            _line(file, step=step.number, end=ended, seconds=round(perf_counter() - start, 3))
            _free(device)


def _free(device: Device) -> None:
    if not device.dry_run:
        # Raises where the GPU has faulted: then the process ends, and the next one begins anew.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _line(file: TextIO, **values: Any) -> None:
    file.write(json.dumps(values) + "\n")
    file.flush()
