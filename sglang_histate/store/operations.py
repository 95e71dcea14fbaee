"""Reads and writes between submission and commit.

Owns the order of submission and what each operation came to. A thread only fills in the outcome of one
operation; nothing else changes until the scheduler thread commits it, because every rank must change in the
same order although its disk may be faster or slower.

    submit -> (a thread) finish -> finished_count() -> flags() -> [the ranks agree] -> take()

Questions take their turn among the reads: what else the ranks must agree on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from .index import Entry
from .kinds import RecordKind
from .reasons import DropReason, MissReason
from .records import Record
from .tasks import Task

Deliver = Callable[[Record, range], None]
"""Hears of the next parts of a record that are verified: segments of a checkpoint, pages of an extent."""


@dataclass(eq=False)
class WriteOperation(Task[DropReason]):
    """One record on its way to its slab."""

    entry: Entry
    record: Record
    captured_at_us: int
    # What it saves in tokens of recomputation per byte; None is worth any price.
    value: float | None = None
    submitted_s: float = 0.0
    # Set when the entry is gone: the record is not worth its bytes and the outcome has no effect.
    abandoned: DropReason | None = None
    is_try: bool = False  # its outcome decides about the root's breaker


@dataclass(eq=False)
class ReadTicket(Task[MissReason]):
    """One read. `ok` is None until the read is committed; then `record` holds the bytes or `miss_reason` says
    why not.

    `miss_reason` is for counters and logs only: it may differ between ranks, `ok` does not.
    """

    key: bytes
    at_token: int
    record: Record | None
    shared: bool  # served from the record that is being written
    root: int  # whose threads serve it
    ok: bool | None = None
    miss_reason: MissReason | None = None
    cancelled: bool = False
    entry: Entry = field(kw_only=True, repr=False)
    deliver: Deliver | None = field(kw_only=True, repr=False, default=None)
    cleared: bool = False

    @property
    def kind(self) -> RecordKind:
        return self.entry.kind

    @property
    def n_pages(self) -> int:
        """KV pages in the record; 0 for a checkpoint."""
        return self.entry.n_pages


@dataclass(eq=False)
class Probe(Task[MissReason]):
    """A small read that shows whether a root can be read again. `answered` gets what all ranks agreed on."""

    root: int
    answered: Callable[[bool], None]


@dataclass(eq=False)
class IsReturned(Task[MissReason]):
    """Is the thread done with the buffer of `task`? What the ranks answer in one commit can differ from the next."""

    task: Task[Any]
    answered: Callable[[bool], None]

    def __post_init__(self) -> None:
        self.finished = True

    def succeeded(self) -> bool:
        return not (self.task.given_up and self.task.running)


Question = Probe | IsReturned


@dataclass(frozen=True)
class WriteOutcome:
    """A committed write: `drop_reason` is None when the entry is LIVE now."""

    key: bytes
    kind: RecordKind
    at_token: int
    drop_reason: DropReason | None


@dataclass(frozen=True)
class Committed:
    """What one commit changed, in submission order. Reads that the caller cancelled are not listed."""

    writes: tuple[WriteOutcome, ...]
    reads: tuple[ReadTicket, ...]


Operation = TypeVar("Operation", bound=Task[Any])


class Uncommitted(Generic[Operation]):
    """Operations that were submitted and not committed, in submission order."""

    def __init__(self) -> None:
        self._pending: deque[Operation] = deque()
        self.committed_count = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._pending)

    @property
    def counts(self) -> tuple[int, int]:
        """How many were committed since open, and how many are not yet."""
        return self.committed_count, len(self._pending)

    def submit(self, operation: Operation) -> None:
        self._pending.append(operation)

    def finished_count(self) -> int:
        """Return how many operations since open have finished, without a gap. It never decreases."""
        count = self.committed_count
        for operation in self._pending:
            if not operation.finished:
                break
            count += 1
        return count

    def flags(self, count: int) -> list[bool]:
        """Return for each uncommitted operation up to number `count` whether it succeeded here."""
        operations = list(islice(self._pending, count - self.committed_count))
        assert len(operations) == count - self.committed_count, "more operations than were submitted"
        assert all(operation.finished for operation in operations), "asked for operations that still run"
        return [operation.succeeded() for operation in operations]

    def take(self) -> Operation:
        """Remove the oldest operation, which must have finished."""
        operation = self._pending.popleft()
        assert operation.finished, "committed an operation that still runs"
        self.committed_count += 1
        return operation
