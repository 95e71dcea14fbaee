"""The SSD tier: checkpoints and KV extents in one file of fixed slabs per rank. No torch, no sglang."""

from .admission import WriteLimits
from .distribution import SECONDS, Distribution
from .index import Entry, EntryState
from .kinds import Key, RecordKind
from .layout import NO_NAMESPACE, NO_PARENT, Fingerprint, RecordLayout
from .namespaces import namespace_of
from .opening import RecoveryReport
from .operations import Committed, Deliver, ReadTicket, WriteOutcome
from .probe import DirectoryFacts, check_roots, probe_directory
from .reasons import DropReason, MissReason, PutResult, StoreError
from .records import Record
from .recovery import LossReason, Recovered
from .stats import KindStats, StoreStats
from .store import CheckpointStore

__all__ = [
    "NO_NAMESPACE",
    "NO_PARENT",
    "SECONDS",
    "CheckpointStore",
    "Committed",
    "Deliver",
    "DirectoryFacts",
    "Distribution",
    "DropReason",
    "Entry",
    "EntryState",
    "Fingerprint",
    "Key",
    "KindStats",
    "LossReason",
    "MissReason",
    "PutResult",
    "ReadTicket",
    "Record",
    "RecordKind",
    "RecordLayout",
    "Recovered",
    "RecoveryReport",
    "StoreError",
    "StoreStats",
    "WriteLimits",
    "WriteOutcome",
    "check_roots",
    "namespace_of",
    "probe_directory",
]
