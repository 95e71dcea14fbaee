"""Many random calls on disks with every fault there is: no wrong byte, no exception, no lost buffer or slab, and all heals.

HISTATE_FAULTS says how many faults are injected at least; 3,000 take a few seconds, 100,000 some minutes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import numpy as np
import pytest

from sglang_histate.store import NO_PARENT, CheckpointStore, MissReason, PutResult, ReadTicket, RecordKind
from sglang_histate.store.disk import FilePlace
from sglang_histate.store.fault_plan import READ_FAULTS, Fault, FaultPlan, Rule
from sglang_histate.store.faults import FaultyDisk
from sglang_histate.store.roots import BreakerRules

from .conftest import LAYOUT, SLAB, key, open_store, page_keys
from .fakes import FakeDisk

WANTED = int(os.environ.get("HISTATE_FAULTS", "3000"))
SLABS, BUFFERS, STEPS = 9, 6, 500
KV = RecordKind.KV
# These two are done to the file, not by a transfer: see `Life.harm`.
BY_TRANSFERS = tuple(fault for fault in Fault if fault not in (Fault.DELETE, Fault.TRUNCATE))
RULES = BreakerRules(write_failures=3, read_failures=4, pause_puts=12, write_pause_s=10.0, read_pause_s=4.0)


class Life:
    """One store on one to three roots, from open to close, and its restart."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        roots = range(self.draw.choice([1, 1, 2, 3]))
        self.disks = [FaultyDisk(FakeDisk(), FaultPlan(), seed=f"{seed}/{root}", root=root) for root in roots]
        self.content: dict[int, int] = {}  # generation -> first number in the record
        self.reading: dict[ReadTicket, tuple[int, list[int]]] = {}  # -> what it must deliver, what it did
        self.held: list[tuple[ReadTicket, int]] = []
        self.late: list[int] = []
        self.harms = 0
        self.hits = 0
        self.next = 0
        self.now_s = 0.0
        self.store = self.open()

    def open(self) -> CheckpointStore:
        return open_store(
            disks=self.disks,
            slabs=SLABS,
            record_buffers=BUFFERS,
            reader_threads=2,
            breakers=RULES,
            keep_unrestorable=True,
        )

    @property
    def faults(self) -> int:
        return self.harms + sum(sum(disk.counts.values()) for disk in self.disks)

    # What callers do.

    def put(self) -> None:
        record = self.store.acquire_record()
        if record is None:
            return
        number, pages = self.draw.randrange(12), self.draw.randrange(1, LAYOUT.pages_per_extent + 1)
        self.next += 100
        if self.draw.random() < 0.5:
            record.payload.view(np.uint32)[:] = self.next
            kind, result = RecordKind.CHECKPOINT, self.store.put(key(number), 64, record)
        else:
            for page in range(pages):
                record.kv_pages[page].view(np.uint32)[:] = self.next + page
            kind, result = (
                KV,
                self.store.put_extent(page_keys(number, pages), 64, record, parent=NO_PARENT),
            )
        if result is PutResult.STORED:
            self.content[self.entry(number, kind).generation] = self.next

    def entry(self, number: int, kind: RecordKind):
        return self.store._index.get((key(number), kind))

    def read(self) -> None:
        number, kind = self.draw.randrange(12), self.draw.choice(list(RecordKind))
        seen: list[int] = []
        state = {"over": False}

        def deliver(record, *_parts) -> None:
            if state["over"]:
                self.late.append(number)
            seen.append(1)

        entry = self.entry(number, kind)
        ticket = self.store.begin_read(key(number), deliver if self.draw.random() < 0.5 else None, kind=kind)
        if isinstance(ticket, MissReason):
            assert ticket in (MissReason.ABSENT, MissReason.NO_BUFFER, MissReason.ROOT_DOWN)
            return
        ticket.over = state  # type: ignore[attr-defined]
        self.reading[ticket] = (self.content[entry.generation], seen)

    def cancel(self) -> None:
        if self.reading:
            ticket = self.draw.choice(list(self.reading))
            self.store.cancel_read(ticket)
            del self.reading[ticket]

    def release(self) -> None:
        if self.held:
            ticket, first = self.held.pop(self.draw.randrange(len(self.held)))
            self.check(ticket, first)
            self.store.release(ticket)

    def drop(self) -> None:
        self.store.drop(key(self.draw.randrange(12)), kind=self.draw.choice(list(RecordKind)))

    def clear(self) -> None:
        if self.draw.random() < 0.2:
            self.store.clear()

    def lookup(self) -> None:
        self.store.lookup(key(self.draw.randrange(12)), self.draw.choice(list(RecordKind)))
        self.store.touch(key(self.draw.randrange(12)), self.draw.choice(list(RecordKind)))

    def tick(self) -> None:
        self.now_s += self.draw.choice([0.1, 1.0, 3.0, 6.0])
        self.store.tick(self.now_s)

    def poll(self) -> None:
        for ticket in self.store.poll().reads:
            first, _ = self.reading.pop(ticket)
            ticket.over["over"] = True  # type: ignore[attr-defined]
            assert ticket.ok is (ticket.miss_reason is None)
            if ticket.ok:
                self.hits += 1
                self.check(ticket, first)
                self.held.append((ticket, first))
            else:
                assert ticket.record is None

    def check(self, ticket: ReadTicket, first: int) -> None:
        if ticket.kind is KV:
            for page in range(ticket.n_pages):
                assert (ticket.record.kv_pages[page].view(np.uint32) == first + page).all(), "a dirty hit"
        else:
            assert (ticket.record.payload.view(np.uint32) == first).all(), "a dirty hit"

    def wait(self) -> None:
        """Let the threads work, for a few milliseconds at most: some may hang."""
        deadline = time.monotonic() + 0.003
        while not self.is_idle() and not any(disk.stuck for disk in self.disks):
            if time.monotonic() > deadline:
                return
            time.sleep(0)

    def is_idle(self) -> bool:
        return sum(self.store.completed()) == sum(self.store.logical_state()[3])

    # What happens to disks.

    def new_weather(self) -> None:
        """Change what goes wrong: nothing, a little of everything, or a lot of one kind in one root."""
        for disk in self.disks:
            roll = self.draw.random()
            if roll < 0.25:
                disk.plan = FaultPlan()
            elif roll < 0.6:
                disk.plan = FaultPlan.even(self.draw.choice([0.1, 0.3, 0.6]), BY_TRANSFERS)
            else:
                fault = self.draw.choice(BY_TRANSFERS)
                chance = self.draw.choice([0.5, 1.0])
                disk.plan = FaultPlan((Rule(fault, chance, reads=fault in READ_FAULTS),))
            if self.draw.random() < 0.7:
                disk.release()

    def harm(self) -> None:
        """Do something to the file, below the store and its disk."""
        disk = self.draw.choice(self.disks)
        inner, self.harms = disk.inner, self.harms + 1
        match self.draw.randrange(5):
            case 0:
                del inner.content[4096 + self.draw.randrange(len(inner.content) or 1) :]
                disk.counts[Fault.TRUNCATE] += 1
            case 1:
                inner.file_place = self.draw.choice(list(FilePlace))
                disk.counts[Fault.DELETE] += 1
            case 2 if len(inner.content) > 4096:
                inner.content[self.draw.randrange(4096, len(inner.content))] ^= 1 << self.draw.randrange(8)
            case 3 if len(inner.content) > 8192:
                at = self.draw.randrange(1, len(inner.content) // 4096) * 4096
                inner.content[at : at + 4096] = bytes(4096)
            case 4 if len(inner.content) >= 4096 + 2 * SLAB:  # an old or another record, sound in itself
                count = (len(inner.content) - 4096) // SLAB
                source, target = (4096 + SLAB * self.draw.randrange(count) for _ in range(2))
                inner.content[target : target + SLAB] = inner.content[source : source + SLAB]

    # The whole.

    def run(self) -> None:
        calls = [self.put] * 6 + [self.read] * 6 + [self.poll] * 5 + [self.tick] * 2
        calls += [self.release] * 3 + [self.cancel, self.drop, self.clear, self.lookup]
        for step in range(STEPS):
            if step % 25 == 0:
                self.new_weather()
            if self.draw.random() < 0.03:
                self.harm()
            self.draw.choice(calls)()
            if self.draw.random() < 0.5:
                self.wait()
            self.check_budgets()
        self.heal()
        self.restart()

    def check_budgets(self) -> None:
        stats = self.store.stats()
        assert stats.entries <= stats.slabs_used <= stats.slabs_total == SLABS
        assert 0 <= stats.buffers_free <= stats.buffers_total == BUFFERS
        for disk in self.disks:
            assert disk.inner.largest_offset <= disk.inner.size
        assert not self.late, "delivered after the read was over"

    def settle(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            if self.is_idle():  # time must not run away from threads that are only slow
                self.now_s += 1.0
                self.store.tick(self.now_s)
            self.poll()
            while self.held:
                self.release()
            stats = self.store.stats()
            if stats.buffers_free == BUFFERS and not self.store.outstanding:
                return
            assert time.monotonic() < deadline, stats
            time.sleep(0.0002)

    def heal(self) -> None:
        """The faults stop: everything comes back, and what is put now can be read."""
        for disk in self.disks:
            disk.plan = FaultPlan()
            disk.inner.file_place = FilePlace.PRESENT
            disk.release()
        self.settle()
        for _ in range(60):  # reads that fail still, of what was harmed before, may open a breaker again
            for number in range(12):
                for kind in RecordKind:
                    self.read_one(number, kind)
            self.put()
            self.settle()
            self.now_s += 10.0
            if not self.store.restless and self.read_all():
                break
        stats = self.store.stats()
        assert not stats.breaker_open and not self.store.restless, stats.roots
        assert stats.files_lost == 0 and stats.slabs_used == stats.entries
        assert not any(root.stuck_reads or root.stuck_writes for root in stats.roots)
        assert MissReason.INTERNAL not in stats.misses
        self.store.clear()
        for number in range(SLABS):
            record = self.store.acquire_record()
            record.payload.view(np.uint32)[:] = number
            assert self.store.put(key(number), 64, record) is PutResult.STORED
            self.content[self.entry(number, RecordKind.CHECKPOINT).generation] = number
            self.settle()
        assert {root.slabs_used - root.slabs_total for root in self.store.stats().roots} == {0}
        assert self.read_all() and self.store.stats().entries == SLABS

    def read_one(self, number: int, kind: RecordKind) -> bool:
        """Read one record; return False if it is there and cannot be read."""
        entry = self.entry(number, kind)
        if entry is None:
            return True
        ticket = self.store.begin_read(key(number), kind=kind)
        if isinstance(ticket, MissReason):
            return False
        ticket.over = {"over": False}  # type: ignore[attr-defined]
        self.reading[ticket] = (self.content[entry.generation], [])
        self.settle()
        return bool(ticket.ok)

    def read_all(self) -> bool:
        return all([self.read_one(number, kind) for number in range(12) for kind in RecordKind])

    def restart(self) -> None:
        """What the next run finds is what was there."""
        before = {entry.name: entry.generation for entry in self.store.entries()}
        self.store.close()
        assert all(disk.inner.closed for disk in self.disks)
        self.store = self.open()
        after = {entry.name: entry.generation for entry in self.store.entries()}
        assert after == before and self.read_all()
        self.store.close()


@pytest.mark.timeout(3000)
def test_no_fault_makes_a_dirty_hit(monkeypatch, caplog):
    monkeypatch.setattr("sglang_histate.store.faults.SLOW_S", 0.0005)
    counts: Counter[Fault] = Counter()
    seed = faults = hits = 0
    while faults < WANTED:
        seed += 1
        life = Life(seed)
        life.run()
        faults += life.faults
        hits += life.hits
        for disk in life.disks:
            counts += disk.counts
    assert set(counts) == set(Fault), "every kind of fault was there"
    assert hits > faults / 10 and "defect" not in caplog.text
    print(f"{faults} faults in {seed} lives, {hits} hits, none dirty; {dict(counts)}")
