"""A device that does nothing but remember: streams, events, threads, who read and wrote which bytes, in which order.

It stands for `torch.cuda` (a module with Stream, Event, stream, current_stream), for the driver of the copy engines, and
for thread pools. Work is carried out at once, in the order in which it is queued, so bytes come out right whatever the
waits; whether they would on a real device is told by vector clocks. Two accesses to the same bytes, one of them a write,
that no chain of queueing and waiting orders are a race.

`skip` is a site (file, line) whose waits are left out: the way to see that a wait is needed and that the check sees it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_histate.copy._kernels.reference import TorchKernels
from sglang_histate.copy.transfer import Descriptors

Range = tuple[int, int]
ROOT = Path(__file__).resolve().parents[2]
_PASSED = {str(Path(__file__).resolve()), str(ROOT / "sglang_histate/copy/ordering.py")}
_HOST = "host"


class Site(NamedTuple):
    """A line of code that waits."""

    file: str
    line: int
    function: str


def bytes_of(tensor: torch.Tensor) -> Range:
    """Return the addresses from a tensor's first byte to behind its last one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def site() -> Site:
    """Return the line of code that waits: the first one outside this file and `copy.ordering`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(Path(frame.f_code.co_filename).resolve())
        if name not in _PASSED and "contextlib" not in name:
            return Site(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError


@dataclass(eq=False)
class Actor:
    """What does things one after the other: the host, a stream, a thread."""

    name: str
    clock: dict[str, int] = field(default_factory=dict)

    def join(self, other: dict[str, int]) -> None:
        for name, count in other.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def step(self) -> None:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1


@dataclass(frozen=True)
class Access:
    actor: str
    count: int
    range: Range
    write: bool
    what: str


class FakeDevice:
    def __init__(self, skip: Site | None = None) -> None:
        self.skip = skip
        self.sites: dict[Site, int] = {}
        self.races: list[str] = []
        self.host_waits: list[str] = []  # on the scheduler thread, outside `may_wait`
        self._accesses: list[Access] = []
        self._host = Actor(_HOST)
        self._actor: Actor | None = None  # a thread of the host that is running
        self._names = 0
        self._finished = 0  # events up to this number are complete
        self._events = 0
        self._may_wait = False
        self._device: list[Range] = []
        self.kept: list[torch.Tensor] = []  # so that no address is used twice
        self.default = self.Stream()
        self._current: list[FakeStream] = [self.default]

    # As torch.cuda.

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        self._names += 1
        return FakeStream(self, Actor(f"stream {self._names}"))

    def Event(self, **_: Any) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def is_current_stream_capturing(self) -> bool:
        return False

    # What the tests say.

    def finish(self) -> None:
        """Everything that is queued is carried out: events recorded so far are complete, threads have ended."""
        self._finished = self._events

    def on_device(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._device.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def host_reads(self, tensor: Any, what: str) -> None:
        self._access([bytes_of(torch.as_tensor(tensor))], [], what, self._host)

    def host_writes(self, tensor: Any, what: str) -> None:
        """The host writes, or gives the memory to somebody who may."""
        self._access([], [bytes_of(torch.as_tensor(tensor))], what, self._host)

    def kernel(
        self, what: str, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Work of the model on the current stream."""
        self.queue([bytes_of(one) for one in reads], [bytes_of(one) for one in writes], what)

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        """A reset, or the end: the scheduler thread may wait here."""
        before, self._may_wait = self._may_wait, True
        try:
            yield
        finally:
            self._may_wait = before

    def fetch(self, tensor: torch.Tensor) -> None:
        """A number on the device is read by the host, which waits for the current stream."""
        stream = self.current_stream()
        self.queue([bytes_of(tensor)], [], "fetch")
        self._host.join(stream.actor.clock)

    # What happens.

    def queue(self, reads: Sequence[Range], writes: Sequence[Range], what: str) -> None:
        """Work on the current stream, or on the thread that is running."""
        actor = self._actor or self.current_stream().actor
        actor.join(self._host.clock if self._actor is None else {})
        self._access(reads, writes, what, actor)

    def _access(self, reads: Sequence[Range], writes: Sequence[Range], what: str, actor: Actor) -> None:
        actor.step()
        for write, ranges in ((False, reads), (True, writes)):
            for one in ranges:
                if one[0] == one[1]:
                    continue
                mine = Access(actor.name, actor.clock[actor.name], one, write, what)
                for other in self._accesses:
                    if (
                        (write or other.write)
                        and other.range[0] < one[1]
                        and one[0] < other.range[1]
                        and actor.clock.get(other.actor, 0) < other.count
                    ):
                        self.races.append(f"{what} ({actor.name}) against {other.what} ({other.actor})")
                self._accesses.append(mine)

    def waits(self) -> bool:
        """Note a wait; return whether it takes place."""
        where = site()
        self.sites[where] = self.sites.get(where, 0) + 1
        return where != self.skip

    def host_waits_for(self, what: str) -> None:
        if not self._may_wait:
            self.host_waits.append(f"{what} at {site()}")

    def new_event(self) -> int:
        self._events += 1
        return self._events

    def is_finished(self, number: int) -> bool:
        return number <= self._finished

    @property
    def last_event(self) -> int:
        return self._events

    @property
    def thread(self) -> Actor | None:
        """The thread that is running, if it is not the scheduler's."""
        return self._actor

    @property
    def host(self) -> Actor:
        return self._host

    @contextmanager
    def running(self, actor: Actor) -> Iterator[None]:
        before, self._actor = self._actor, actor
        try:
            yield
        finally:
            self._actor = before

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return any(first <= start < end for first, end in self._device)

    def patch(self, monkeypatch: Any) -> None:
        """Have the thread pools of lanes run on this device."""
        from sglang_histate.copy import ordering

        monkeypatch.setattr(ordering, "ThreadPoolExecutor", lambda *_, **__: FakeExecutor(self))


class FakeStream:
    def __init__(self, device: FakeDevice, actor: Actor) -> None:
        self.device = device
        self.actor = actor
        self.cuda_stream = 1000 + device._names
        self.done_until = 0  # events on this stream up to that number are complete

    def wait_event(self, event: FakeEvent) -> None:
        if self.device.waits():
            self.actor.join(event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        if self.device.waits():
            self.actor.join(stream.actor.clock)

    def synchronize(self) -> None:
        if self.device.waits():
            self.device.host_waits_for("a stream")
            self.device.host.join(self.actor.clock)
            self.done_until = self.device.last_event


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.clock: dict[str, int] = {}
        self.number = 0
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = self.device.current_stream() if stream is None else stream
        stream.actor.join(self.device.host.clock)
        self.clock, self.stream = dict(stream.actor.clock), stream
        self.number = self.device.new_event()

    def wait(self, stream: FakeStream | None = None) -> None:
        if self.device.waits():
            (self.device.current_stream() if stream is None else stream).actor.join(self.clock)

    def query(self) -> bool:
        if not self.device.waits():
            return True
        done = self.device.is_finished(self.number) or (
            self.stream is not None and self.number <= self.stream.done_until
        )
        if done:
            self.device.host.join(self.clock)
        return done

    def synchronize(self) -> None:
        if self.device.waits():
            if not self.device.is_finished(self.number):
                self.device.host_waits_for("an event")
            self.device.host.join(self.clock)

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


class FakeFuture:
    def __init__(self, device: FakeDevice, clock: dict[str, int]) -> None:
        self.device, self.clock, self.number = device, clock, device.new_event()

    def done(self) -> bool:
        if not self.device.waits():
            return True
        if not self.device.is_finished(self.number):
            return False
        self.device.host.join(self.clock)
        return True

    def result(self) -> None:
        if self.device.waits():
            if not self.device.is_finished(self.number):
                self.device.host_waits_for("a thread")
            self.device.host.join(self.clock)

    def exception(self) -> None:
        self.result()


class FakeExecutor:
    """A thread of its own, whose work is done at once and known to be done later."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        device._names += 1
        self._actor = Actor(f"thread {device._names}")

    def submit(self, work: Callable[..., None], *arguments: Any) -> FakeFuture:
        self._actor.join(self._device.host.clock)
        with self._device.running(self._actor):
            work(*arguments)
        return FakeFuture(self._device, dict(self._actor.clock))

    def shutdown(self) -> None:
        pass


class FakeDriver:
    """The driver's two calls on host memory. `codes` are what the next batch calls answer."""

    def __init__(self, device: FakeDevice, codes: Sequence[int] = (), *, on_host: bool = False) -> None:
        """`on_host`: what is copied is copied by the thread that calls."""
        self._device = device
        self._on_host = on_host
        self._codes = list(codes)
        self.calls: list[int] = []

    def stream(self) -> int:
        return self._device.current_stream().cuda_stream

    def capturing(self) -> bool:
        return self._device.is_current_stream_capturing()

    def batch(self, found: Descriptors, stream: int) -> int:
        code = self._codes.pop(0) if self._codes else 0
        if code == 0:
            self.calls.append(len(found))
            self._run(found)
        return code

    def single(self, source: int, target: int, size: int, stream: int) -> int:
        self._queue([(source, source + size)], [(target, target + size)])
        ctypes.memmove(target, source, size)
        return 0

    def is_invalid_value(self, code: int) -> bool:
        return code == 1

    def _run(self, found: Descriptors) -> None:
        pieces = list(zip(found.sources.tolist(), found.targets.tolist(), found.sizes.tolist(), strict=True))
        self._queue(
            [(source, source + size) for source, _, size in pieces],
            [(target, target + size) for _, target, size in pieces],
        )
        for source, target, size in pieces:
            ctypes.memmove(target, source, size)

    def _queue(self, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        if self._on_host and self._device.thread is None:
            with self._device.running(self._device.host):
                self._device.queue(reads, writes, "copy")
        else:
            self._device.queue(reads, writes, "copy")


class DeviceKernels(TorchKernels):
    """The reference, for which the slots' numbers lie on the device: only what is queued there may read them."""

    def pack(self, pool: Any, slots: Any, records: Any, encoding: Any, *, flags: Any = None, **_: Any) -> Any:
        self._pack(pool, pool.form(encoding), slots, records, flags, 0)
        return flags


class Watch(TorchDispatchMode):
    """Sees each operation of torch on this thread: what touches the device's memory is work on the current stream.

    What an operation makes of the device's memory lies on the device too. The host's own work is not followed: where it
    matters, the tests say it.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        device = self._device
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and not device.is_on_device(inputs[0]):
            device.host_reads(inputs[0], "a number is read")
        if not any(device.is_on_device(one) for one in inputs):
            return out
        if func is torch.ops.aten._local_scalar_dense.default:
            device.host_waits_for("a number")
            device.fetch(inputs[0])
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        known = {one.untyped_storage().data_ptr() for one in inputs}
        if all(one.untyped_storage().data_ptr() in known for one in results) and not func._schema.is_mutable:
            return out  # a view: nothing is read
        device.kept += results
        fresh = [one for one in results if one.untyped_storage().data_ptr() not in known]
        device.on_device(*fresh)
        changed = [
            value
            for argument, value in _named(func, args, kwargs)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, torch.Tensor)
        ]
        reads = [one for one in inputs if not any(one is other for other in changed)]
        device.kernel(str(func), reads, [*changed, *fresh])
        return out


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
