"""The two kinds of records, and how a record is named.

A checkpoint and an extent may carry the same page hash: the kind is part of the name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class RecordKind(StrEnum):
    CHECKPOINT = "checkpoint"  # the recurrent state after the page that its key names
    KV = "kv"  # an extent: consecutive KV pages, the last of which its key names


class Key(NamedTuple):
    """Name of one record: `hash` is the 32-byte hash of its last page."""

    hash: bytes
    kind: RecordKind = RecordKind.CHECKPOINT
