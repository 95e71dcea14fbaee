"""The ordering contract of copies: who waits for whom, written down where the wait is made.

Wrong bytes come from a missing wait far more often than from a wrong address, and they come rarely. So copies between
device and host run on *lanes*, every wait names the rule it serves, and a test removes each wait in turn and has to see
what goes wrong.

    STATE        A captured state is complete before it is copied: the lane follows the stream that wrote it.
    RESTAGE      What lies in a block of the staging ring was copied before the block is written again.
    INDEX        A number computed on the device is complete before it is copied to the host, or a kernel reads it.
    INDEX_READ   That number is on the host before it is used there.
    HANDOVER     The bytes are in the record before the record is handed to the store, or the slot to the pool.
    QUIET        Nothing is on its way any more when the tree, the pool or the records are emptied.
    SPILL        The pages are in the record before it is handed over and the pages may go.

Restores and demotions are SGLang's transfers: they start behind what the scheduler queued, behind the forward pass that
may still read or write the rows, and each layer of the next forward pass waits for its own event. HiState only plans them.

No call here makes the thread wait but `drain` and `Mark.wait`, which are for resets, ends and threads of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any

import torch

Work = Callable[[], None]


class Rule(Enum):
    """What a wait is for; see the module."""

    STATE = "state"
    RESTAGE = "restage"
    INDEX = "index"
    INDEX_READ = "index read"
    HANDOVER = "handover"
    QUIET = "quiet"
    SPILL = "spill"


class Mark(ABC):
    """A point in a lane: behind all that was queued before it."""

    @abstractmethod
    def reached(self, rule: Rule) -> bool:
        """Return whether everything before it is done. What went wrong on a thread is raised here. Never waits."""


class Lane(ABC):
    """Work in order, beside the thread that queues it."""

    @abstractmethod
    def run(self, work: Work) -> None:
        """Queue `work`, which moves bytes or computes on them. It may run now, or on another thread after `mark`."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark behind all work so far."""

    @abstractmethod
    def drain(self, rule: Rule) -> None:
        """Wait until all work up to the last mark is done; work behind it may be dropped."""


class _Reached(Mark):
    def reached(self, rule: Rule) -> bool:
        return True


REACHED = _Reached()
"""Of work that was done when it was queued."""


class InlineLane(Lane):
    """Work is done when it is queued: plain copies on a CPU."""

    def run(self, work: Work) -> None:
        work()

    def mark(self) -> Mark:
        return REACHED

    def drain(self, rule: Rule) -> None:
        pass


class FutureMark(Mark):
    """Reached when the future has ended; its exception is raised then."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def reached(self, rule: Rule) -> bool:
        return self.future.done() and self.future.result() is None

    def wait(self, rule: Rule) -> None:
        """Wait for the end, and raise what went wrong."""
        self.future.result()


class ThreadLane(Lane):
    """One thread. Work begins when the mark behind it is made, so that it does not take a core from what goes before."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._jobs: list[Work] = []
        self._newest: FutureMark | None = None

    def run(self, work: Work) -> None:
        self._jobs.append(work)

    def mark(self) -> FutureMark:
        if self._jobs or self._newest is None:
            jobs, self._jobs = self._jobs, []
            self._newest = FutureMark(self._thread.submit(_run_all, jobs))
        return self._newest

    def drain(self, rule: Rule) -> None:
        self._jobs.clear()
        if self._newest is not None:
            self._newest.future.exception()

    def close(self) -> None:
        self._thread.shutdown()


@torch.inference_mode()
def _run_all(jobs: list[Work]) -> None:
    for job in jobs:
        job()


class EventMark(Mark):
    """An event on a stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self, rule: Rule) -> bool:
        return bool(self.event.query())


class StreamLane(Lane):
    """A stream of the device. `streams` is `torch.cuda`, or what stands for it in tests."""

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        self._streams = streams
        # The lowest priority there is: a copy has none, but encodings should not keep kernels of the model waiting.
        self._stream = streams.Stream(device, priority=0)

    def follow_current(self, rule: Rule) -> None:
        """Later work waits for what the current stream has so far."""
        self.follow(self._streams.current_stream(), rule)

    def follow(self, stream: Any, rule: Rule) -> None:
        """Later work waits for what `stream` has so far."""
        self._stream.wait_event(self._event_on(stream))

    def _event_on(self, stream: Any) -> Any:
        """Return an event behind what `stream` has so far."""
        event = self._streams.Event()
        event.record(stream)
        return event

    def hold_current(self, mark: EventMark, rule: Rule) -> None:
        """The current stream's later work waits for `mark`."""
        self._streams.current_stream().wait_event(mark.event)

    def run(self, work: Work) -> None:
        with self._streams.stream(self._stream):
            work()

    def mark(self) -> EventMark:
        return EventMark(self._event_on(self._stream))

    def drain(self, rule: Rule) -> None:
        self._stream.synchronize()
