"""What an older run left in the slabs: found by its headers, checked, and cut down to what can be used.

The superblock and the slab headers are the only truth, so nothing can disagree with them. Payloads are not
read here: every read verifies its sums, so a torn one is a miss later and never a hit. Nothing in here changes
the file or the index.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .blocks import SlabHeader, version_of
from .disk import Disk
from .kinds import Key, RecordKind
from .layout import FORMAT_VERSION, NO_PARENT, Fingerprint, RecordLayout
from .striping import Striping

THREADS = 16
_SLABS_PER_TASK = 64
_BATCH_BYTES = 32 << 20


class LossReason(StrEnum):
    """Why a record that an older run wrote is not in the index. What is only on this disk may differ by rank."""

    READ_ERROR = "read_error"  # its header could not be read
    UNSOUND = "unsound"  # torn or damaged header
    OTHER_VERSION = "other_version"  # of the format
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_LAYOUT = "other_layout"  # parts or lengths that this store cannot have
    CUT_OFF = "cut_off"  # the file is smaller now: slabs that are gone, whatever they held
    SUPERBLOCK = "superblock"  # without a sound one of this store nobody knows what was cleared
    NOT_KEPT = "not_kept"  # the caller wants to begin empty
    CLEARED = "cleared"  # the store was cleared after it was written
    DUPLICATE = "duplicate"  # a younger record has the same key
    OTHER_RANK = "other_rank"  # another rank does not have it
    NO_KV = "no_kv"  # a checkpoint without all the KV before it
    NO_CHECKPOINT = "no_checkpoint"  # KV that no checkpoint can use


@dataclass(frozen=True, slots=True)
class Recovered:
    """One record that an older run left: all that must be equal on every rank. Fields as in `Entry`."""

    key: bytes
    kind: RecordKind
    at_token: int
    parent: bytes
    page_keys: tuple[bytes, ...]
    namespace: bytes
    slab: int
    generation: int

    @property
    def name(self) -> Key:
        return Key(self.key, self.kind)


@dataclass
class Found:
    """What a scan saw. `newest` is the highest generation of this store, also among what was dropped."""

    entries: list[Recovered] = field(default_factory=list)
    losses: Counter[LossReason] = field(default_factory=Counter)
    newest: int = 0

    def lose(self, entries: Iterable[Recovered], reason: LossReason) -> None:
        """Take these entries out."""
        gone = {entry.slab for entry in entries}
        self.entries = [entry for entry in self.entries if entry.slab not in gone]
        if gone:
            self.losses[reason] += len(gone)


def scan(disk: Disk, layout: RecordLayout, slab_count: int, fingerprint: Fingerprint) -> Found:
    """Read all slab headers of one file, in threads; return the sound ones by slab. One that cannot be read is a loss.

    The threads only read, some MiB at a time, and the headers are parsed afterwards: threads that do both spend
    more time on handing over the interpreter than on their work.
    """
    found = Found()
    size = layout.header_bytes
    most = max(1, min(slab_count, _BATCH_BYTES // size))
    with (
        mmap.mmap(-1, most * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
        memoryview(memory) as headers,
        ThreadPoolExecutor(THREADS, thread_name_prefix="histate-recover") as pool,
    ):
        for first in range(0, slab_count, most):
            slabs = range(first, min(first + most, slab_count))
            shares = [slabs[at : at + _SLABS_PER_TASK] for at in range(0, len(slabs), _SLABS_PER_TASK)]
            read = pool.map(lambda share, first=first: _read(disk, layout, headers, share, first), shares)
            for share, whole in zip(shares, read, strict=True):
                for slab, is_whole in zip(share, whole, strict=True):
                    at = (slab - first) * size
                    _take(found, layout, fingerprint, slab, memory[at : at + size] if is_whole else None)
    return found


def join(parts: Sequence[Found], striping: Striping) -> Found:
    """Return what was found in the files of all roots, by the numbers that the slabs have in the store."""
    if len(parts) == 1:
        return parts[0]
    whole = Found()
    for root, part in enumerate(parts):
        whole.entries += [replace(one, slab=striping.slab(root, one.slab)) for one in part.entries]
        whole.losses += part.losses
        whole.newest = max(whole.newest, part.newest)
    return whole


def drop_duplicates(found: Found) -> None:
    """Of two records with one key keep the one with the higher generation, then the one in the lower slab."""
    best: dict[Key, Recovered] = {}
    losers = []
    for entry in found.entries:
        other = best.get(entry.name)
        if other is None:
            best[entry.name] = entry
        elif (entry.generation, -entry.slab) > (other.generation, -other.slab):
            best[entry.name] = entry
            losers.append(other)
        else:
            losers.append(entry)
    found.lose(losers, LossReason.DUPLICATE)


def _read(disk: Disk, layout: RecordLayout, headers: memoryview, slabs: range, first: int) -> list[bool]:
    """Read the headers of `slabs` to their places, where that of slab `first` comes first; return which are whole."""
    size, whole = layout.header_bytes, []
    for slab in slabs:
        at = (slab - first) * size
        try:
            whole.append(disk.read_at([headers[at : at + size]], layout.slab_offset(slab)) == size)
        except OSError:
            whole.append(False)
    return whole


def _take(
    found: Found, layout: RecordLayout, fingerprint: Fingerprint, slab: int, block: bytes | None
) -> None:
    """Enter what the header in `block` (None: it could not be read) says."""
    if block is None:
        found.losses[LossReason.READ_ERROR] += 1
        return
    version = version_of(block)
    if version is None:
        return  # never written
    if version != FORMAT_VERSION:
        found.losses[LossReason.OTHER_VERSION] += 1
        return
    header = SlabHeader.parse(block)
    if header is None:
        found.losses[LossReason.UNSOUND] += 1
    elif header.fingerprint_half != fingerprint.digest[:16]:
        found.losses[LossReason.OTHER_FINGERPRINT] += 1
    else:
        found.newest = max(found.newest, header.generation)
        if fits(header, layout):
            found.entries.append(_recovered(header, slab))
        else:
            found.losses[LossReason.OTHER_LAYOUT] += 1


def fits(header: SlabHeader, layout: RecordLayout) -> bool:
    """Return whether the store could have written a record of these lengths."""
    if header.n_pages > layout.pages_per_extent:
        return False
    if header.kind is RecordKind.CHECKPOINT and header.parent != NO_PARENT:
        return False
    n_parts = header.n_pages or len(layout.segment_bytes)
    content_bytes = layout.content_bytes(header.kind, header.n_pages)
    return (len(header.part_sums), header.content_bytes) == (n_parts, content_bytes)


def _recovered(header: SlabHeader, slab: int) -> Recovered:
    return Recovered(
        header.key,
        header.kind,
        header.at_token,
        header.parent,
        header.page_keys,
        header.namespace,
        slab,
        header.generation,
    )


@dataclass(frozen=True)
class Restorable:
    """What can be used again, in the order in which it was given."""

    checkpoints: list[Recovered]
    extents: list[Recovered]


def restorable(entries: Sequence[Recovered]) -> Restorable:
    """Return the checkpoints that have all KV before them, and the extents on the way to one of these.

    A page hash stands for its whole prefix, so pages are found by hash alone: the KV of a checkpoint is
    complete if its key is a page of an extent whose `parent` is a page of another one, and so on, up to
    NO_PARENT. All of one namespace. Linear in the number of pages.
    """
    extents = [entry for entry in entries if entry.kind is RecordKind.KV]
    chains = _Chains(extents)
    checkpoints = [
        entry
        for entry in entries
        if entry.kind is RecordKind.CHECKPOINT and chains.use(entry.key, entry.namespace)
    ]
    needed = chains.needed()
    # Of an extent that has needed pages, the first is one of them.
    used = [extent for extent in extents if extent.page_keys[0] in needed.get(extent.namespace, ())]
    return Restorable(checkpoints, used)


class _Chains:
    """Extents by their numbers in a list, and how far each one is needed."""

    def __init__(self, extents: Sequence[Recovered]) -> None:
        self._extents = extents
        # Namespace -> page -> an extent that has it. If there are several, each is as good: a page hash stands
        # for its whole prefix, so the chains of all of them are whole, or none is.
        self._holders: dict[bytes, dict[bytes, int]] = {}
        for at, extent in enumerate(extents):
            self._holders.setdefault(extent.namespace, {}).update(dict.fromkeys(extent.page_keys, at))
        self._whole: dict[int, bool] = {}  # extent -> its chain reaches the start of the sequence
        self._last_needed: dict[int, int] = {}  # extent -> its last page that a checkpoint needs

    def use(self, page: bytes, namespace: bytes) -> bool:
        """Return whether all KV up to `page` is there; if so, it is needed."""
        at = self._find(page, namespace)
        if at is None or not self._is_whole(at):
            return False
        while at is not None:
            extent = self._extents[at]
            known = self._last_needed.get(at, -1)
            self._last_needed[at] = max(known, extent.page_keys.index(page))
            if known >= 0:
                break  # so is all before it
            page = extent.parent
            at = self._find(page, namespace)
        return True

    def needed(self) -> dict[bytes, set[bytes]]:
        """Return the pages that a checkpoint needs, by namespace."""
        pages: dict[bytes, set[bytes]] = {}
        for at, last in self._last_needed.items():
            extent = self._extents[at]
            pages.setdefault(extent.namespace, set()).update(extent.page_keys[: last + 1])
        return pages

    def _find(self, page: bytes, namespace: bytes) -> int | None:
        return self._holders.get(namespace, {}).get(page)

    def _is_whole(self, at: int) -> bool:
        path, step, whole = [], at, False
        while step not in self._whole:
            self._whole[step] = False  # also what a ring of extents comes to
            path.append(step)
            extent = self._extents[step]
            if extent.parent == NO_PARENT:
                whole = True
                break
            before = self._find(extent.parent, extent.namespace)
            if before is None:
                break
            step = before
        else:
            whole = self._whole[step]
        for passed in path:
            self._whole[passed] = whole
        return self._whole[at]
