"""Restores through the store beside plain sequential O_DIRECT reads of the same bytes, one after the other.

A restore is what a server does: `begin_read`, a reader thread reads, verifies and copies into a place that stands for a
slot of the host pool, the scheduler thread polls and commits. The plain read is one `preadv` for each record in the order
of the file into one buffer, and nothing else.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eval.progress import each
from sglang_histate.store import CheckpointStore, Entry, MissReason, ReadTicket, Record, RecordKind

from .filled import content_of

POLL_S = 0.0003


@dataclass(frozen=True)
class Pass:
    """All records read once. CPU seconds: of the whole process, and of the thread that polls for the outcome (or reads)."""

    records: int
    bytes_read: int  # headers included, so the same for every way of reading
    seconds: float
    cpu_s: float
    own_cpu_s: float
    latencies_s: tuple[float, ...]

    @property
    def mb_per_s(self) -> float:
        return self.bytes_read / self.seconds / 1e6

    @property
    def cpu_ms_per_record(self) -> float:
        return 1000 * self.cpu_s / self.records

    @property
    def readers_ms_per_record(self) -> float:
        """CPU time of the reader threads."""
        return 1000 * (self.cpu_s - self.own_cpu_s) / self.records


class Clock:
    def __init__(self) -> None:
        self._start = self._now()

    def elapsed(self) -> tuple[float, float, float]:
        """Return seconds by the wall clock, of CPU by the process, of CPU by this thread."""
        seconds, process, own = (now - start for now, start in zip(self._now(), self._start, strict=True))
        return seconds, process, own

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


class HostSlots:
    """Memory that is there already, as large as `count` records, and copies into it."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.ones((count, size_bytes), dtype=np.uint8)

    def begin(self, store: CheckpointStore, entry: Entry, slot: int) -> ReadTicket:
        """Begin to read `entry` into `slot`."""
        target = self.memory[slot]

        sizes = store.layout.part_bytes(entry.kind, entry.n_pages)

        def deliver(record: Record, parts: range) -> None:
            content = content_of(record, entry)
            start, end = sum(sizes[: parts.start]), sum(sizes[: parts.stop])
            target[start:end] = content[start:end]

        ticket = store.begin_read(entry.key, deliver, kind=entry.kind)
        assert not isinstance(ticket, MissReason), ticket
        return ticket


def transfer_bytes(store: CheckpointStore, entries: Sequence[Entry]) -> int:
    return sum(store.layout.transfer_bytes(entry.kind, entry.n_pages) for entry in entries)


def restored(store: CheckpointStore, entries: Sequence[Entry], slots: HostSlots, depth: int) -> Pass:
    """Read `entries`, at most `depth` at a time."""
    todo, latencies = list(reversed(entries)), []
    free = list(range(depth))
    running: dict[int, tuple[int, float]] = {}
    clock = Clock()
    while todo or running:
        while todo and free:
            slot = free.pop()
            begun_s = time.perf_counter()
            running[id(slots.begin(store, todo.pop(), slot))] = slot, begun_s
        done = store.poll().reads
        for ticket in done:
            assert ticket.ok, ticket
            slot, begun_s = running.pop(id(ticket))
            latencies.append(time.perf_counter() - begun_s)
            free.append(slot)
            store.release(ticket)
        if not done:
            time.sleep(POLL_S)
    return Pass(len(entries), transfer_bytes(store, entries), *clock.elapsed(), tuple(latencies))


class PlainReader:
    """The same file, without the store."""

    def __init__(self, path: Path, slab_bytes: int, direct: bool) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        memory = mmap.mmap(-1, slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # as the store's records
        self._buffer = memoryview(memory)
        self._buffer[:] = bytes(slab_bytes)  # its pages exist before they are timed

    def read(self, store: CheckpointStore, entries: Sequence[Entry]) -> Pass:
        layout, latencies, total = store.layout, [], 0
        clock = Clock()
        for entry in entries:
            begun_s = time.perf_counter()
            wanted = layout.transfer_bytes(entry.kind, entry.n_pages)
            count = os.preadv(self._fd, [self._buffer[:wanted]], layout.slab_offset(entry.slab))
            assert count == wanted, (count, wanted)
            total += count
            latencies.append(time.perf_counter() - begun_s)
        return Pass(len(entries), total, *clock.elapsed(), tuple(latencies))

    def close(self) -> None:
        os.close(self._fd)


def all_ways(
    store: CheckpointStore,
    path: Path,
    entries: Sequence[Entry],
    depths: Sequence[int],
    rounds: int,
) -> dict[int, list[Pass]]:
    """Return the passes by depth, 0 for the plain read, in `rounds` rounds that each begin with another way."""
    plain = PlainReader(path, store.layout.slab_bytes, store.stats().direct_io)
    slots = HostSlots(max(depths), store.layout.room_bytes)
    ways = [0, *depths]
    passes: dict[int, list[Pass]] = {way: [] for way in ways}
    check(store, entries[0], slots)
    for number in each(range(rounds), "read", "round"):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            one = restored(store, entries, slots, way) if way else plain.read(store, entries)
            passes[way].append(one)
    plain.close()
    return passes


def check(store: CheckpointStore, entry: Entry, slots: HostSlots) -> None:
    """What arrives in a slot must be what a read without one finds."""
    restored(store, [entry], slots, 1)
    ticket = store.begin_read(entry.key, kind=entry.kind)
    assert not isinstance(ticket, MissReason), ticket
    while store.outstanding:
        store.poll()
    assert ticket.ok and ticket.record is not None
    size = store.layout.content_bytes(RecordKind(entry.kind), entry.n_pages)
    assert np.array_equal(slots.memory[0][:size], content_of(ticket.record, entry)), "other bytes arrived"
    store.release(ticket)
