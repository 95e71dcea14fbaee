"""The SSD tier: checkpoints of recurrent states in one file of fixed slabs per rank. No torch, no sglang."""

from .index import Entry, EntryState
from .layout import Fingerprint, RecordLayout
from .operations import Committed, ReadTicket, WriteOutcome
from .probe import DirectoryFacts, check_directory, probe_directory
from .reasons import DropReason, MissReason, PutResult, StoreError
from .records import Record
from .stats import StoreStats
from .store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "Committed",
    "DirectoryFacts",
    "DropReason",
    "Entry",
    "EntryState",
    "Fingerprint",
    "MissReason",
    "PutResult",
    "ReadTicket",
    "Record",
    "RecordLayout",
    "StoreError",
    "StoreStats",
    "WriteOutcome",
    "check_directory",
    "probe_directory",
]
