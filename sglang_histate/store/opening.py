"""How a store gets hold of its file: check, create, lock, preallocate, O_DIRECT, recover, superblock.

Runs once, before the store has a thread. Whatever fails here ends in a `StoreError`; the store never opens
half.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .block_zero import BlockZero
from .blocks import Superblock
from .disk import Disk, PosixDisk
from .faults import from_environment
from .kinds import RecordKind
from .layout import Fingerprint, RecordLayout, epoch_of, generation
from .probe import SLAB_FILE, check_directory, make_private, probe_directory
from .reasons import StoreError
from .records import RecordPool
from .recovery import Found, LossReason, Recovered, drop_duplicates, restorable, scan
from .snapshot import SNAPSHOT_FILE, SnapshotFile, SnapshotState, by_last_use, load_snapshot

_log = logging.getLogger("sglang_histate.store")
_RANK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Agree = Callable[[list[Recovered]], list[Recovered]]
AgreeEpoch = Callable[[int], int]


@dataclass(frozen=True)
class RecoveryRules:
    """What is taken over from an older run, see `CheckpointStore.open`."""

    keep: bool = True
    agree: Agree | None = None
    agree_epoch: AgreeEpoch | None = None
    keep_unrestorable: bool = False


@dataclass(frozen=True)
class RecoveryReport:
    """What an older run left. Losses and seconds may differ by rank."""

    checkpoints: int
    extents: int
    seconds: float
    losses: Mapping[LossReason, int]
    order: SnapshotState  # where the order of use comes from
    clean: bool  # the last run closed the store in order

    def __str__(self) -> str:
        lost = ", ".join(f"{count} {reason.value}" for reason, count in sorted(self.losses.items()))
        return (
            f"recovered {self.checkpoints} checkpoints and {self.extents} extents in {self.seconds:.2f} s, "
            f"dropped: {lost or 'nothing'}; last shutdown {'in order' if self.clean else 'not in order'}, "
            f"order of use: snapshot {self.order.value}"
        )


@dataclass(frozen=True)
class Opened:
    """A file that a store can work with. `recovered`: least recently used first, the same on every rank.

    `written`: the last day (since 1970) in which something was written, and how many bytes; may differ by rank.
    """

    disk: Disk
    block_zero: BlockZero
    snapshots: SnapshotFile | None
    epoch: int
    recovered: list[Recovered]
    written: tuple[int, int]
    report: RecoveryReport


def slab_file(root: Path, fingerprint: Fingerprint, rank_name: str) -> Path:
    """Return where the slab file of one rank lies.

    Raises:
        ValueError: `rank_name` is not a plain file name.
    """
    if not _RANK_NAME.fullmatch(rank_name):
        raise ValueError(f"rank name {rank_name!r} must be a plain file name such as tp0of1-pp0of1")
    return root / fingerprint.directory_name / rank_name / SLAB_FILE


def open_file(
    root: Path,
    rank_name: str,
    size_bytes: int,
    layout: RecordLayout,
    fingerprint: Fingerprint,
    records: RecordPool,
    rules: RecoveryRules,
    disk: Disk | None = None,
    snapshots: SnapshotFile | None = None,
) -> Opened:
    """Return the locked, preallocated file of this rank and what it holds. A given `disk` is that file.

    Raises:
        StoreError: see `check_directory` and `PosixDisk.open`; or block 0 cannot be read or written.
    """
    slab_count = layout.slab_count(size_bytes)
    if disk is not None:
        disk.preallocate(layout.file_bytes(slab_count))
        block_zero = BlockZero(disk, layout, slab_count, fingerprint)
        return _take_over(
            disk, _read(block_zero), block_zero, snapshots, slab_count, layout, fingerprint, rules
        )
    file = slab_file(root, fingerprint, rank_name)
    check_directory(root, size_bytes, slab_bytes=layout.slab_bytes, store_file=file)
    make_private(file.parent.parent)
    make_private(file.parent)
    raw = PosixDisk.open(file)
    try:
        raw.preallocate(layout.file_bytes(slab_count))
        block_zero = BlockZero(raw, layout, slab_count, fingerprint)
        found = _read(block_zero)
        # The probe writes to block 0: what is there, or something by whose rule nothing in the file counts.
        page = block_zero.page() if found is None else found.pack()
        direct = raw.enable_direct(page, [record.image for record in records.records])
        disk = from_environment(raw, rank_name, layout)
        snapshots = SnapshotFile(file.with_name(SNAPSHOT_FILE))
        opened = _take_over(disk, found, block_zero, snapshots, slab_count, layout, fingerprint, rules)
    except BaseException:
        raw.close()
        raise
    _report(root, file, slab_count, layout, direct)
    return opened


def _report(root: Path, file: Path, slab_count: int, layout: RecordLayout, direct: bool) -> None:
    _log.info(
        "%s: %d slabs of %d bytes, O_DIRECT %s",
        file,
        slab_count,
        layout.slab_bytes,
        "on" if direct else "off",
    )
    filesystem = probe_directory(root)
    if not filesystem.suitable:
        _log.warning("--histate-ssd-dir %s is on %s, not on a local disk", root, filesystem.filesystem)
    if not direct:
        _log.warning(
            "--histate-ssd-dir %s: O_DIRECT does not work there, reads go through the page cache", root
        )


def _take_over(
    disk: Disk,
    superblock: Superblock | None,
    block_zero: BlockZero,
    snapshots: SnapshotFile | None,
    slab_count: int,
    layout: RecordLayout,
    fingerprint: Fingerprint,
    rules: RecoveryRules,
) -> Opened:
    """Recover what counts and begin a new epoch, above all that was ever seen in the file.

    The new superblock is written last: until then a crash changes nothing.
    """
    started = time.monotonic()
    found = scan(disk, layout, slab_count, fingerprint)
    epoch = 1 + max(0 if superblock is None else superblock.epoch, epoch_of(found.newest))
    if rules.agree_epoch is not None:
        epoch = max(epoch, rules.agree_epoch(epoch))
    order, snapshot = load_snapshot(snapshots, fingerprint, 0 if superblock is None else superblock.epoch)
    oldest_valid = _drop_invalid(found, superblock, slab_count, epoch, keep=rules.keep)
    mine = by_last_use(found.entries, snapshot if order is SnapshotState.USED else None)
    recovered = _agreed(found, mine, rules)
    if not rules.keep_unrestorable:
        recovered = _restorable(found, recovered)
    _begin(disk, block_zero, epoch, oldest_valid)
    kinds = Counter(entry.kind for entry in recovered)
    report = RecoveryReport(
        checkpoints=kinds[RecordKind.CHECKPOINT],
        extents=kinds[RecordKind.KV],
        seconds=time.monotonic() - started,
        losses=dict(found.losses),
        order=order,
        clean=superblock is not None and superblock.clean,
    )
    if recovered or found.losses:
        _log.info("%s", report)
    written = (0, 0) if snapshot is None else snapshot.written
    return Opened(disk, block_zero, snapshots, epoch, recovered, written, report)


def _drop_invalid(
    found: Found, superblock: Superblock | None, slab_count: int, epoch: int, *, keep: bool
) -> int:
    """Drop what does not count any more; return the oldest generation that does."""
    if superblock is None or not keep:
        found.lose(found.entries, LossReason.NOT_KEPT if superblock is not None else LossReason.SUPERBLOCK)
        return generation(epoch, 0)
    if superblock.slab_count > slab_count:
        found.losses[LossReason.CUT_OFF] = superblock.slab_count - slab_count
    oldest_valid = superblock.oldest_valid
    found.lose([one for one in found.entries if one.generation < oldest_valid], LossReason.CLEARED)
    drop_duplicates(found)
    return min(oldest_valid, generation(epoch, 0))  # what this run writes counts in any case


def _agreed(found: Found, mine: list[Recovered], rules: RecoveryRules) -> list[Recovered]:
    if rules.agree is None:
        return mine
    ours = rules.agree(list(mine))
    kept = set(ours)
    assert len(kept) == len(ours) and kept <= set(mine), "ranks agreed on what this one does not have"
    found.lose([one for one in mine if one not in kept], LossReason.OTHER_RANK)
    return ours


def _restorable(found: Found, entries: list[Recovered]) -> list[Recovered]:
    usable = restorable(entries)
    kept = {one.slab for one in (*usable.checkpoints, *usable.extents)}
    for kind, reason in _USELESS.items():
        found.lose([e for e in entries if e.kind is kind and e.slab not in kept], reason)
    return [one for one in entries if one.slab in kept]


_USELESS = {RecordKind.CHECKPOINT: LossReason.NO_KV, RecordKind.KV: LossReason.NO_CHECKPOINT}


def _read(block_zero: BlockZero) -> Superblock | None:
    try:
        return block_zero.read()
    except OSError as error:
        raise _unusable(error) from error


def _begin(disk: Disk, block_zero: BlockZero, epoch: int, oldest_valid: int) -> None:
    try:
        block_zero.begin(epoch, oldest_valid)
        disk.sync()
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> StoreError:
    return StoreError(f"--histate-ssd-dir: the slab file cannot be used ({error}): check the disk")
