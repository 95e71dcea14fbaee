"""The roots of one store at run time: each a directory on a disk of its own, with its file, threads and breakers.

Owns which roots may be written and read at the moment. A root that is lost costs its share: reads there are
misses, then nothing is asked of it until it answers again. Says nothing about records; `in_flight.py` tells
it how operations ended. But for the threads all of it runs on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .block_zero import BlockZero
from .breaker import Breaker, BreakerState, BreakerStats
from .disk import Disk, FilePlace
from .events import EventLog
from .layout import Fingerprint
from .operations import Probe
from .reader import Reader, ReadGate
from .reasons import DropReason, MissReason
from .striping import Striping
from .writer import Writer


@dataclass(frozen=True)
class BreakerRules:
    """When a root is left alone, see `Breaker`, and for how long. Seconds need `CheckpointStore.tick`."""

    write_failures: int = 3
    read_failures: int = 5
    pause_puts: int = 64
    write_pause_s: float = 30.0
    read_pause_s: float = 5.0


@dataclass(frozen=True)
class RootFile:
    """The open file of one root. `name`: the directory as the user gave it."""

    name: str
    disk: Disk
    block_zero: BlockZero


@dataclass(frozen=True)
class RootStats:
    """`file_place`, `direct_io` and the reasons of the breakers are what this rank sees; the rest is the same on all.

    `stuck_reads` and `stuck_writes` were given up and still hang in a thread somewhere. `hidden_lookups` were
    answered as if the entry were not there, because its root cannot be read.
    """

    name: str
    slabs_used: int
    slabs_total: int
    direct_io: bool
    file_place: FilePlace
    reads: BreakerStats
    writes: BreakerStats
    hidden_lookups: int
    stuck_reads: int
    stuck_writes: int


class Root:
    def __init__(
        self,
        number: int,
        file: RootFile,
        striping: Striping,
        fingerprint: Fingerprint,
        threads: int,
        rules: BreakerRules,
        events: EventLog,
    ) -> None:
        self.number = number
        self.name = file.name
        self.disk = file.disk
        self.block_zero = file.block_zero
        self.hidden_lookups = 0
        self.reads = Breaker(rules.read_failures, rules.pause_puts, rules.read_pause_s)
        self.writes = Breaker(rules.write_failures, rules.pause_puts, rules.write_pause_s)
        gate = ReadGate()
        self.reader = Reader(self.disk, striping, fingerprint, gate, threads)
        self.writer = Writer(self.disk, striping, fingerprint, gate, self.block_zero.settle)
        self._events = events
        self._slabs_total = striping.slabs_in(number)
        self._file_place = FilePlace.PRESENT

    @property
    def readable(self) -> bool:
        return self.reads.is_closed

    @property
    def writable(self) -> bool:
        """What cannot be read again is not worth writing."""
        return self.readable and self.writes.admits

    def wrote(self, ok: bool, reason: DropReason | None, *, was_try: bool) -> None:
        """A write was committed."""
        changed = self.writes.record(ok, reason and reason.value, was_try=was_try)
        self._say(changed, "write", "written", reason)

    def read(self, ok: bool, reason: MissReason | None, *, was_try: bool = False) -> None:
        """A read was committed."""
        changed = self.reads.record(ok, reason and reason.value, was_try=was_try)
        self._say(changed, "read", "read", reason)

    def probed(self, ok: bool) -> None:
        """A probe was committed."""
        self.read(ok, None, was_try=True)

    def look(self) -> None:
        """Say so once if the file has lost its name."""
        state = self.disk.file_place
        if state is self._file_place:
            return
        self._file_place = state
        if state is FilePlace.PRESENT:
            self._events.warn(f"file {self.number}", "--histate-ssd-dir %s: the slab file is back", self.name)
        else:
            self._events.warn(
                f"file {self.number}",
                "--histate-ssd-dir %s: the slab file of this process was %s behind its back: it is used until the "
                "process ends, but what is in it will not be found at the next start",
                self.name,
                {FilePlace.DELETED: "deleted", FilePlace.MISSING: "moved away"}.get(state, "replaced"),
            )

    def stats(self, slabs_free: int, stuck_reads: int, stuck_writes: int) -> RootStats:
        return RootStats(
            name=self.name,
            slabs_used=self._slabs_total - slabs_free,
            slabs_total=self._slabs_total,
            direct_io=self.disk.direct,
            file_place=self.disk.file_place,
            reads=self.reads.stats(),
            writes=self.writes.stats(),
            hidden_lookups=self.hidden_lookups,
            stuck_reads=stuck_reads,
            stuck_writes=stuck_writes,
        )

    def _say(self, changed: BreakerState | None, kind: str, done: str, reason: object) -> None:
        if changed is BreakerState.OPEN:
            self._events.warn(
                f"{kind} breaker opens {self.number}",
                "--histate-ssd-dir %s: the last %ss failed (%s): nothing is %s there until it works again; "
                "it is tried again from time to time",
                self.name,
                kind,
                reason or "on another rank",
                done,
            )
        elif changed is BreakerState.CLOSED:
            self._events.warn(
                f"{kind} breaker closes {self.number}",
                "--histate-ssd-dir %s can be %s again",
                self.name,
                done,
            )


class Roots:
    """All roots, in the order of --histate-ssd-dir."""

    def __init__(self, roots: Sequence[Root], striping: Striping) -> None:
        self.striping = striping
        self._roots = tuple(roots)

    @classmethod
    def start(
        cls,
        files: Sequence[RootFile],
        striping: Striping,
        fingerprint: Fingerprint,
        reader_threads: int,
        rules: BreakerRules,
        events: EventLog,
    ) -> Roots:
        """Start the threads: `reader_threads` for all roots, but two for each, so that one that hangs stops none."""
        each = reader_threads if len(files) == 1 else max(2, -(-reader_threads // len(files)))
        roots = [
            Root(number, file, striping, fingerprint, each, rules, events)
            for number, file in enumerate(files)
        ]
        return cls(roots, striping)

    def __iter__(self) -> Iterator[Root]:
        return iter(self._roots)

    def __getitem__(self, number: int) -> Root:
        return self._roots[number]

    def of(self, slab: int) -> Root:
        return self._roots[self.striping.root(slab)]

    @property
    def ailing(self) -> bool:
        """Whether a breaker is not closed."""
        return any(not (root.reads.is_closed and root.writes.is_closed) for root in self._roots)

    def in_service(self) -> Root:
        """Return the first root that can be read, or the first of all."""
        return next((root for root in self._roots if root.readable), self._roots[0])

    def writable(self) -> list[int]:
        """Return the numbers of the roots that may be written now."""
        return [root.number for root in self._roots if root.writable]

    def to_try(self, free_in: Callable[[int], int]) -> int | None:
        """Return the first root whose next write decides whether it is used again, if it has a free slab."""
        waiting = (root.number for root in self._roots if root.readable and root.writes.wants_try)
        return next((number for number in waiting if free_in(number)), None)

    def put(self) -> None:
        """A put comes: what goes without a root counts towards the end of its pause."""
        for root in self._roots:
            root.reads.put()
            root.writes.put()

    def tick(self, now_s: float, submit: Callable[[Probe], None]) -> None:
        """End pauses whose time has come; `submit` the reads that show whether a root is back to the ranks' queue."""
        for root in self._roots:
            root.reads.tick(now_s)
            root.writes.tick(now_s)
            root.look()
            if root.reads.wants_try:
                root.reads.begin()
                probe = Probe(root.number, root.probed)
                submit(probe)
                root.reader.submit(probe)

    def logical_state(self) -> tuple[object, ...]:
        """Return what must be equal on every rank."""
        return tuple((root.reads.logical_state(), root.writes.logical_state()) for root in self._roots)
