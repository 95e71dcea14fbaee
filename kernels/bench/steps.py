"""The steps, in the order in which they run, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from .device import Device
from .scale import DRY, Scale, States

TOTAL_S = 480


class OutOfTime(Exception):
    """A step has used up its time. What it has measured counts."""


@dataclass
class Bench:
    """What a step gets: the device, its sizes, a place for files, and where its rows go."""

    device: Device
    scale: Scale
    folder: Path
    library: Path
    emit: Callable[[dict[str, Any]], None]
    deadline: float = float("inf")

    @cached_property
    def states(self) -> States:
        return States(self.device, self.scale)

    def row(self, **values: Any) -> None:
        """Write down one measurement; then the step ends if its time is up."""
        self.emit(values)
        self.check()

    def check(self) -> None:
        if monotonic() > self.deadline:
            raise OutOfTime


@dataclass(frozen=True)
class Step:
    number: int
    name: str
    limit_s: float
    run: Callable[[Bench], None]


def steps() -> list[Step]:
    from . import disk, errors, fragments, interference, link, machine, records, safety

    return [
        Step(0, "machine", 10, machine.run),
        Step(1, "link", 60, link.run),
        Step(2, "to_host", 90, records.to_host),
        Step(3, "to_device", 60, records.to_device),
        Step(4, "interference", 90, interference.run),
        Step(5, "fragments", 40, fragments.run),
        Step(6, "disk", 60, disk.run),
        Step(7, "safety", 50, safety.run),
        Step(8, "errors", 20, errors.run),
    ]


def scale_of(dry_run: bool) -> Scale:
    return DRY if dry_run else Scale()
