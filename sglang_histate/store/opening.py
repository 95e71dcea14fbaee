"""How a store gets hold of its files: check, create, lock, preallocate, O_DIRECT, recover, superblocks.

Runs once, before the store has a thread. Whatever fails here ends in a `StoreError`; the store never opens
half.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .block_zero import EVERYTHING, BlockZero
from .blocks import Superblock
from .disk import Disk, PosixDisk
from .faults import from_environment
from .kinds import RecordKind
from .layout import Fingerprint, epoch_of, generation
from .probe import SLAB_FILE, check_roots, make_private
from .reasons import StoreError
from .records import RecordPool
from .recovery import Found, LossReason, Recovered, drop_duplicates, join, restorable, scan
from .roots import RootFile
from .snapshot import SNAPSHOT_FILE, SnapshotFile, SnapshotState, by_last_use, load_snapshots
from .striping import Striping

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
    """Files that a store can work with. `recovered`: least recently used first, the same on every rank.

    `written`: the last day (since 1970) in which something was written, and how many bytes; may differ by rank.
    """

    files: tuple[RootFile, ...]  # one for each root
    snapshots: SnapshotFile | None
    epoch: int
    recovered: list[Recovered]
    written: tuple[int, int]
    report: RecoveryReport


@dataclass(frozen=True)
class Place:
    """Where a store lies: its directories, in order, and what is above the file of this rank in each of them.

    `disks` take the place of the files in tests, and `snapshots` that of the file beside the first one; then no
    directory is touched.
    """

    roots: Sequence[Path]
    rank_name: str
    size_bytes: int
    allow_any_filesystem: bool = False
    disks: Sequence[Disk] = ()
    snapshots: SnapshotFile | None = None


def slab_file(root: Path, fingerprint: Fingerprint, rank_name: str) -> Path:
    """Return where the slab file of one rank lies.

    Raises:
        ValueError: `rank_name` is not a plain file name.
    """
    if not _RANK_NAME.fullmatch(rank_name):
        raise ValueError(f"rank name {rank_name!r} must be a plain file name such as tp0of1-pp0of1")
    return root / fingerprint.directory_name / rank_name / SLAB_FILE


def open_files(
    place: Place, striping: Striping, fingerprint: Fingerprint, records: RecordPool, rules: RecoveryRules
) -> Opened:
    """Return the locked, preallocated files of this rank and what they hold.

    Raises:
        StoreError: see `check_roots` and `PosixDisk.open`; or block 0 cannot be read or written.
    """
    if place.disks:
        files = []
        for number, disk in enumerate(place.disks):
            disk.preallocate(striping.file_bytes(number))
            block_zero = BlockZero(disk, striping, number, fingerprint)
            files.append(RootFile(f"disk {number}", disk, block_zero))
        found = [_read(file.block_zero) for file in files]
        return _take_over(files, found, [place.snapshots], striping, fingerprint, rules)
    paths = [slab_file(root, fingerprint, place.rank_name) for root in place.roots]
    check_roots(
        place.roots,
        place.size_bytes,
        slab_bytes=striping.layout.slab_bytes,
        store_files=paths,
        allow_any_filesystem=place.allow_any_filesystem,
    )
    with ExitStack() as stack:
        files, found = [], []
        for number, (root, path) in enumerate(zip(place.roots, paths, strict=True)):
            make_private(path.parent.parent)
            make_private(path.parent)
            raw = PosixDisk.open(path)
            stack.callback(raw.close)
            raw.preallocate(striping.file_bytes(number))
            block_zero = BlockZero(raw, striping, number, fingerprint)
            superblock = _read(block_zero)
            # The probe writes to block 0: what is there, or something by whose rule nothing in the file counts.
            page = block_zero.page() if superblock is None else superblock.pack()
            raw.enable_direct(page, [record.image for record in records.records])
            _report(root, path, raw.direct, striping, number, superblock)
            found.append(superblock)
            files.append(
                RootFile(
                    str(root), from_environment(raw, place.rank_name, striping.layout, number), block_zero
                )
            )
        snapshots = [SnapshotFile(path.with_name(SNAPSHOT_FILE)) for path in paths]
        opened = _take_over(files, found, snapshots, striping, fingerprint, rules)
        stack.pop_all()
    return opened


def _report(
    root: Path, path: Path, direct: bool, striping: Striping, number: int, superblock: Superblock | None
) -> None:
    _log.info(
        "%s: %d slabs of %d bytes, O_DIRECT %s",
        path,
        striping.slabs_in(number),
        striping.layout.slab_bytes,
        "on" if direct else "off",
    )
    if not direct:
        _log.warning(
            "--histate-ssd-dir %s: O_DIRECT does not work there, reads and writes go through the page cache",
            root,
        )
    if superblock is not None and (superblock.root, superblock.n_roots) != (number, striping.n_roots):
        # Not wrong: each file says by itself what is in it. But what is in a directory that is not given is away.
        _log.info(
            "--histate-ssd-dir %s was directory %d of %d before, now it is %d of %d",
            root,
            superblock.root + 1,
            superblock.n_roots,
            number + 1,
            striping.n_roots,
        )


def _take_over(
    files: Sequence[RootFile],
    superblocks: Sequence[Superblock | None],
    snapshots: Sequence[SnapshotFile | None],
    striping: Striping,
    fingerprint: Fingerprint,
    rules: RecoveryRules,
) -> Opened:
    """Recover what counts and begin a new epoch, above all that was ever seen in the files.

    The new superblocks are written last: until then a crash changes nothing.
    """
    started = time.monotonic()
    last_epoch = max(0 if superblock is None else superblock.epoch for superblock in superblocks)
    parts = [
        scan(file.disk, striping.layout, striping.slabs_in(number), fingerprint)
        for number, file in enumerate(files)
    ]
    epoch = 1 + max(last_epoch, *(epoch_of(part.newest) for part in parts))
    if rules.agree_epoch is not None:
        epoch = max(epoch, rules.agree_epoch(epoch))
    order, snapshot = load_snapshots(snapshots, fingerprint, last_epoch)
    oldest_valid = _oldest_valid(superblocks, epoch, keep=rules.keep)
    for number, (part, superblock) in enumerate(zip(parts, superblocks, strict=True)):
        _drop_invalid(part, superblock, striping.slabs_in(number), oldest_valid, keep=rules.keep)
    found = join(parts, striping)
    drop_duplicates(found)
    mine = by_last_use(found.entries, snapshot if order is SnapshotState.USED else None)
    recovered = _agreed(found, mine, rules)
    if not rules.keep_unrestorable:
        recovered = _restorable(found, recovered)
    for file in files:
        _begin(file, epoch, oldest_valid)
    kinds = Counter(entry.kind for entry in recovered)
    report = RecoveryReport(
        checkpoints=kinds[RecordKind.CHECKPOINT],
        extents=kinds[RecordKind.KV],
        seconds=time.monotonic() - started,
        losses=dict(found.losses),
        order=order,
        clean=all(superblock is not None and superblock.clean for superblock in superblocks),
    )
    if recovered or found.losses:
        _log.info("%s", report)
    written = (0, 0) if snapshot is None else snapshot.written
    return Opened(tuple(files), snapshots[0], epoch, recovered, written, report)


def _oldest_valid(superblocks: Sequence[Superblock | None], epoch: int, *, keep: bool) -> int:
    """Return the oldest generation that counts: a clear that any root knows of holds for all.

    One root may have been away when the store was cleared, and a new one knows of nothing.
    """
    known = [superblock.oldest_valid for superblock in superblocks if superblock is not None]
    known = [number for number in known if number != EVERYTHING]
    begins = generation(epoch, 0)  # what this run writes counts in any case
    return min(max(known, default=begins), begins) if keep else begins


def _drop_invalid(
    found: Found, superblock: Superblock | None, slab_count: int, oldest_valid: int, *, keep: bool
) -> None:
    """Drop what does not count any more in one root."""
    if superblock is None or not keep:
        found.lose(found.entries, LossReason.NOT_KEPT if superblock is not None else LossReason.SUPERBLOCK)
        return
    if superblock.slab_count > slab_count:
        found.losses[LossReason.CUT_OFF] = superblock.slab_count - slab_count
    oldest_valid = max(oldest_valid, superblock.oldest_valid)
    found.lose([one for one in found.entries if one.generation < oldest_valid], LossReason.CLEARED)


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


def _begin(file: RootFile, epoch: int, oldest_valid: int) -> None:
    try:
        file.block_zero.begin(epoch, oldest_valid)
        file.disk.sync()
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> StoreError:
    return StoreError(f"--histate-ssd-dir: the slab file cannot be used ({error}): check the disk")
