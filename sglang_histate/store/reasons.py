"""Why the store said no: one enum per question, so that every miss, refusal and drop is counted by name.

Owns the words, not the counters (`stats.py`) and not the decisions (`store.py`).
"""

from __future__ import annotations

from enum import StrEnum


class StoreError(Exception):
    """The store cannot be opened. The text is one sentence: the flag, its value, the fault, the way out."""


class PutResult(StrEnum):
    """What became of a record that was handed to `CheckpointStore.put`. Only STORED keeps the record."""

    STORED = "stored"
    ALREADY_STORED = "already_stored"  # the key is in the index; it was touched
    NO_SLAB = "no_slab"  # every slab is being written or read
    BREAKER_OPEN = "breaker_open"  # too many writes in a row failed
    CLOSED = "closed"


class MissReason(StrEnum):
    """Why a read gave nothing. Those from IO_ERROR on are found while reading and can differ by rank."""

    ABSENT = "absent"  # no such key
    NO_BUFFER = "no_buffer"  # every record buffer is in use
    CLOSED = "closed"
    CLEARED = "cleared"  # the store was cleared while the read was in flight
    OTHER_RANK = "other_rank"  # this rank read it well, another rank did not
    IO_ERROR = "io_error"
    SHORT_READ = "short_read"
    CORRUPT_HEADER = "corrupt_header"  # magic, version or header checksum
    WRONG_FINGERPRINT = "wrong_fingerprint"
    WRONG_KEY = "wrong_key"  # key or token position
    WRONG_GENERATION = "wrong_generation"  # an older record: the write of this one never reached the disk
    WRONG_LENGTH = "wrong_length"
    CORRUPT_SEGMENT = "corrupt_segment"
    INTERNAL = "internal"  # a defect in the store; the traceback is in the log


class DropReason(StrEnum):
    """Why an entry left the index. Which of the write reasons is reported may differ between ranks."""

    EVICTED = "evicted"  # its slab was needed for a newer record
    REMOVED = "removed"  # the caller asked
    CLEARED = "cleared"
    CLOSED = "closed"
    READ_FAILED = "read_failed"  # on this rank or on another
    WRITE_ERROR = "write_error"
    SHORT_WRITE = "short_write"
    OTHER_RANK = "other_rank"  # this rank wrote it well, another rank did not
    INTERNAL = "internal"
