"""Operations that take too long, and buffers that a thread may still be using.

An operation whose thread makes no progress for `LIMIT_S` is given up: it counts as failed, so that what was
submitted after it can be committed. Its thread may hang in a system call for ever, and with it the buffer and,
of a write, the slab. They come back once every rank says that its thread has returned, which is asked again
and again: that too must happen on all ranks in the same commit. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .events import EventLog
from .operations import IsReturned, Question, ReadTicket, Uncommitted, WriteOperation
from .reader import Reader
from .reasons import DropReason, MissReason
from .roots import Root, Roots
from .tasks import Task
from .writer import Writer

# A slab takes milliseconds, on a throttled cloud disk a second. What takes longer has lost its purpose.
LIMIT_S = 5.0
ASK_AGAIN_S = 1.0


@dataclass(eq=False)
class _Held:
    task: Task[Any]
    root: Root
    give_back: Callable[[], None]
    asked_s: float


@dataclass
class _Seen:
    """Where a task was at the last look, and since when."""

    mark: tuple[bool, int]
    since_s: float


class Overdue:
    def __init__(
        self,
        roots: Roots,
        writes: Uncommitted[WriteOperation],
        reads: Uncommitted[ReadTicket | Question],
        events: EventLog,
    ) -> None:
        self._roots = roots
        self._writes = writes
        self._reads = reads
        self._events = events
        self._now_s = 0.0
        self._seen: dict[Task[Any], _Seen] = {}
        self._held: list[_Held] = []

    def hold(self, task: Task[Any], root: Root, give_back: Callable[[], None]) -> None:
        """`task` failed on some rank: call `give_back` when no rank's thread uses its buffer any more."""
        self._ask(_Held(task, root, give_back, self._now_s))

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def stuck(self, root: Root) -> tuple[int, int]:
        """Return how many reads and writes of `root` were given up and have not returned here."""
        running = [held.task for held in self._held if held.root is root and held.task.running]
        reads = sum(isinstance(task, ReadTicket) for task in running)
        return reads, len(running) - reads

    def tick(self, now_s: float) -> None:
        """Give up what made no progress; ask again for what is held. `now_s` is the same on every rank."""
        self._now_s = now_s
        for held in [held for held in self._held if now_s - held.asked_s >= ASK_AGAIN_S]:
            self._held.remove(held)
            held.asked_s = now_s
            self._ask(held)
        seen, self._seen = self._seen, {}
        for task, root, lane in self._unfinished():
            mark = (True, task.steps) if task.running else (False, lane.progress)
            before = seen.get(task)
            if before is None or before.mark != mark or now_s < before.since_s:
                self._seen[task] = _Seen(mark, now_s)
            elif now_s - before.since_s < LIMIT_S:
                self._seen[task] = before
            else:
                self._give_up(task, root)

    def _unfinished(self) -> Iterator[tuple[Task[Any], Root, Reader | Writer]]:
        for write in self._writes:
            if not write.finished:
                root = self._roots.of(write.entry.slab)
                yield write, root, root.writer
        for read in self._reads:
            if not read.finished and not isinstance(read, IsReturned):
                root = self._roots[read.root]
                yield read, root, root.reader

    def _give_up(self, task: Task[Any], root: Root) -> None:
        writing = isinstance(task, WriteOperation)
        if not task.give_up(DropReason.TIMED_OUT if writing else MissReason.TIMED_OUT):
            return
        if not writing:
            root.reader.forget(task)
        self._events.warn(
            f"overdue {root.number}",
            "--histate-ssd-dir %s: a %s has made no progress for %.0f s and is given up",
            root.name,
            "write" if writing else "read",
            LIMIT_S,
        )

    def _ask(self, held: _Held) -> None:
        def answered(returned: bool) -> None:
            if returned:
                held.give_back()
            else:
                self._held.append(held)

        self._reads.submit(IsReturned(held.task, answered))
