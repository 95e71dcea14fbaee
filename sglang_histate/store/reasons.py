"""Why the store said no: one enum per question, so that every miss, refusal and drop is counted by name.

Owns the words, not the counters (`stats.py`) and not the decisions (`store.py`).
"""

from __future__ import annotations

from enum import StrEnum


class StoreError(Exception):
    """The store cannot be opened. The text is one sentence: the flag, its value, the fault, the way out."""


class PutResult(StrEnum):
    """What became of a record that was handed to the store. Only STORED keeps the record."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"  # the key is in the index; it was touched
    NO_SLAB = "no_slab"  # nothing may be replaced: all slabs are in use, or the policy keeps what there is
    BAD_VICTIM = "bad_victim"  # the policy chose a record that is in use or not in the index
    NO_BUFFER = "no_buffer"  # every record buffer is in use
    WRITE_BUDGET = "write_budget"  # the bytes per second are used up
    DAILY_CAP = "daily_cap"  # the bytes of this day are used up
    LOW_VALUE = "low_value"  # bytes are short, and others are worth more
    QUEUE_AGE = "queue_age"  # it would wait too long for the writes before it, which are worth as much
    BREAKER_OPEN = "breaker_open"  # too many writes in a row failed
    QUARANTINED = "quarantined"  # see `CheckpointStore.quarantine`
    CLOSED = "closed"


class MissReason(StrEnum):
    """Why a read gave nothing. Those from IO_ERROR on are found while reading and can differ by rank."""

    ABSENT = "absent"  # no such key
    NO_BUFFER = "no_buffer"  # every record buffer is in use
    ROOT_DOWN = "root_down"  # its root cannot be read at the moment, so nothing was tried
    QUARANTINED = "quarantined"
    CLOSED = "closed"
    CLEARED = "cleared"  # the store was cleared while the read was in flight
    OTHER_RANK = "other_rank"  # this rank read it well, another rank did not
    IO_ERROR = "io_error"
    TIMED_OUT = "timed_out"  # the disk hangs; the read was given up
    SHORT_READ = "short_read"
    CORRUPT_HEADER = "corrupt_header"  # magic, version or header checksum
    WRONG_FINGERPRINT = "wrong_fingerprint"
    WRONG_KIND = "wrong_kind"  # a checkpoint where an extent should be, or the other way round
    WRONG_KEY = "wrong_key"  # key, hashes of the pages, parent, token position or namespace
    WRONG_GENERATION = "wrong_generation"  # an older record: the write of this one never reached the disk
    WRONG_LENGTH = "wrong_length"
    CORRUPT_SEGMENT = "corrupt_segment"  # of a checkpoint
    CORRUPT_PAGE = "corrupt_page"  # of an extent
    NOT_FINITE = "not_finite"  # a state with NaN or infinity, about to be read from memory
    INTERNAL = "internal"  # a defect in the store; the traceback is in the log


class DropReason(StrEnum):
    """Why an entry left the index. Which of the reasons for a failed write is found may differ by rank."""

    EVICTED = "evicted"  # its slab was needed for a newer record
    REMOVED = "removed"  # the caller asked
    ORPHANED = (
        "orphaned"  # the caller asked: KV without a checkpoint that restores it, or a checkpoint without KV
    )
    CLEARED = "cleared"
    PURGED = "purged"  # and erased from the disk
    QUARANTINED = "quarantined"  # it may be as wrong as the record that was found to be
    CLOSED = "closed"
    QUEUE_AGE = "queue_age"  # writes were waiting for too long, and it was worth least
    ABORTED = "aborted"  # its request was aborted before the KV that it restores was in the tree
    ROOT_DOWN = "root_down"  # its root cannot be read at the moment, and it was put again
    READ_FAILED = "read_failed"  # on this rank or on another
    WRITE_FAILED = "write_failed"  # on this rank or on another; what `agreed` makes of the ones below
    WRITE_ERROR = "write_error"
    SHORT_WRITE = "short_write"
    TIMED_OUT = "timed_out"  # the disk hangs; the write was given up
    OTHER_RANK = "other_rank"  # this rank wrote it well, another rank did not
    NOT_FINITE = "not_finite"  # a state with NaN or infinity is never stored
    INTERNAL = "internal"

    @property
    def agreed(self) -> DropReason:
        """The reason as every rank sees it: the details of a failed write are left out."""
        return DropReason.WRITE_FAILED if self in _WRITE_FAILURES else self


_WRITE_FAILURES = frozenset(
    {
        DropReason.WRITE_ERROR,
        DropReason.SHORT_WRITE,
        DropReason.TIMED_OUT,
        DropReason.OTHER_RANK,
        DropReason.NOT_FINITE,
        DropReason.INTERNAL,
    }
)
