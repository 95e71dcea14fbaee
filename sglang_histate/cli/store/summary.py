"""What the headers of one slab file come to: entries and bytes by kind, ages, tenants, losses, and its snapshot."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_histate.store.blocks import SlabHeader
from sglang_histate.store.kinds import Key, RecordKind
from sglang_histate.store.layout import NO_NAMESPACE, Fingerprint
from sglang_histate.store.private_files import open_below
from sglang_histate.store.quarantine import QUARANTINE_FILE, read_quarantine
from sglang_histate.store.snapshot import SNAPSHOT_FILE, Snapshot, SnapshotState
from sglang_histate.store.survey import FileState, SlabFile, SlabState

AGES = (("1 min", 60), ("10 min", 600), ("1 h", 3600), ("6 h", 6 * 3600), ("1 d", 86400), ("7 d", 7 * 86400))
_OLDER = "older"


@dataclass
class Summary:
    """Of one file; records with the same name count once."""

    entries: Counter[RecordKind] = field(default_factory=Counter)
    content_bytes: Counter[RecordKind] = field(default_factory=Counter)
    slabs: Counter[SlabState] = field(default_factory=Counter)
    namespaces: Counter[bytes] = field(default_factory=Counter)
    ages: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys([*(name for name, _ in AGES), _OLDER], 0)
    )
    oldest_us: int | None = None
    newest_us: int | None = None

    @property
    def tenants(self) -> int:
        """How many pairs of cache salt and extra key have something here."""
        return len(self.namespaces.keys() - {NO_NAMESPACE})


def summarize(file: SlabFile, now_s: float | None = None) -> Summary:
    """Read all headers."""
    found = Summary()
    now_us = (time.time() if now_s is None else now_s) * 1e6
    newest: dict[Key, SlabHeader] = {}
    for slab in file.headers():
        found.slabs[slab.state] += 1
        if slab.state is not SlabState.RECORD or slab.header is None:
            continue
        name = Key(slab.header.key, slab.header.kind)
        if name not in newest or newest[name].generation < slab.header.generation:
            newest[name] = slab.header
    for header in newest.values():
        found.entries[header.kind] += 1
        found.content_bytes[header.kind] += header.content_bytes
        found.namespaces[header.namespace] += 1
        found.ages[_age((now_us - header.captured_at_us) / 1e6)] += 1
    times = [header.captured_at_us for header in newest.values()]
    found.oldest_us, found.newest_us = min(times, default=None), max(times, default=None)
    return found


def facts(file: SlabFile) -> dict[str, Any]:
    """Return all that can be said of a file, as JSON values."""
    said: dict[str, Any] = {
        "file": str(file.path),
        "state": file.state.value,
        "format": file.version,
        "holder_pid": file.holder,
        "file_bytes": file.file_bytes,
        "allocated_bytes": file.allocated_bytes,
    }
    if file.state is not FileState.STORE or file.superblock is None or file.layout is None:
        return said
    found, block = summarize(file), file.superblock
    snapshot, state = snapshot_of(file)
    quarantine = read_quarantine(file.path.with_name(QUARANTINE_FILE))
    return said | {
        "fingerprint": block.fingerprint_sha256.hex(),
        "identity": file.identity,
        "epoch": block.epoch,
        "closed_in_order": block.clean,
        "slab_bytes": block.slab_bytes,
        "slabs": file.slab_count,
        "slabs_by_state": {state.value: found.slabs[state] for state in SlabState},
        "entries": {kind.value: found.entries[kind] for kind in RecordKind},
        "content_bytes": {kind.value: found.content_bytes[kind] for kind in RecordKind},
        "bytes_used": sum(found.entries.values()) * block.slab_bytes,
        "oldest_write": stamp(found.oldest_us),
        "newest_write": stamp(found.newest_us),
        "ages": found.ages,
        "tenants": found.tenants,
        "entries_without_tenant": found.namespaces[NO_NAMESPACE],
        "snapshot": state.value,
        "snapshot_names": 0 if snapshot is None else len(snapshot.names),
        "written_today_bytes": _written_today(snapshot),
        "quarantined": None if quarantine is None else f"{quarantine.since}: {quarantine.why}",
    }


def snapshot_of(file: SlabFile) -> tuple[Snapshot | None, SnapshotState]:
    """Return the snapshot beside the slabs, and whether the next start can use its order."""
    assert file.superblock is not None
    try:
        fd = open_below(file.root, file.path.with_name(SNAPSHOT_FILE), os.O_RDONLY)
    except FileNotFoundError:
        return None, SnapshotState.MISSING
    with os.fdopen(fd, "rb") as content:
        found = Snapshot.parse(content.read(), Fingerprint(file.superblock.fingerprint_json))
    if not isinstance(found, Snapshot):
        return None, found
    return found, SnapshotState.USED if found.epoch == file.superblock.epoch else SnapshotState.STALE


def stamp(time_us: int | None) -> str | None:
    """Return a time as text, UTC."""
    if time_us is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_us / 1e6))


def _age(seconds: float) -> str:
    return next((name for name, limit in AGES if seconds < limit), _OLDER)


def _written_today(snapshot: Snapshot | None) -> int | None:
    if snapshot is None:
        return None
    day, count = snapshot.written
    return count if day == int(time.time() // 86400) else 0
