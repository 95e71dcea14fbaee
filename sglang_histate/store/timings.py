"""How long reads and writes take: the wait for a thread, and the work of that thread. One set for each kind of record."""

from __future__ import annotations

from typing import Any

from .distribution import Distribution
from .tasks import Task


class Timings:
    """Filled at commit on the scheduler thread, of operations that went to the disk. What was given up counts until then."""

    def __init__(self) -> None:
        self.read = Distribution()
        self.read_wait = Distribution()
        self.write = Distribution()
        self.write_wait = Distribution()

    def add_read(self, task: Task[Any]) -> None:
        _add(task, self.read_wait, self.read)

    def add_write(self, task: Task[Any]) -> None:
        _add(task, self.write_wait, self.write)


def _add(task: Task[Any], wait: Distribution, work: Distribution) -> None:
    begun_s = task.ended_s if task.begun_s is None else task.begun_s
    wait.add(begun_s - task.made_s)
    if task.begun_s is not None:
        work.add(task.ended_s - task.begun_s)
