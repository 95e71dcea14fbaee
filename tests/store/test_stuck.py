"""Calls that never return: what goes on beside them, what comes back after them, and that nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sglang_histate.store import DropReason, MissReason, PutResult, ReadTicket
from sglang_histate.store.overdue import ASK_AGAIN_S, LIMIT_S
from sglang_histate.store.roots import BreakerRules
from sglang_histate.store.tasks import Task

from .conftest import SLAB, key, open_store, put, settle
from .fakes import FakeDisk

NEVER = BreakerRules(write_failures=1000, read_failures=1000)


class GatedDisk(FakeDisk):
    """Transfers of the slabs in `stuck` hang until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: set[int] = set()
        self.hanging = 0
        self._changed = threading.Condition()

    def read_at(self, buffers, offset):
        self._wait(offset)
        return super().read_at(buffers, offset)

    def write_at(self, buffers, offset):
        self._wait(offset)
        return super().write_at(buffers, offset)

    def release(self) -> None:
        with self._changed:
            self.stuck.clear()
            self._changed.notify_all()

    def wait_hanging(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.hanging == count, 5), self.hanging

    def _wait(self, offset: int) -> None:
        with self._changed:
            if offset not in self.stuck:
                return
            self.hanging += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: offset not in self.stuck, 20)
            self.hanging -= 1
            self._changed.notify_all()


class Bench:
    def __init__(self, **changes) -> None:
        self.disk = GatedDisk()
        settings = dict(disks=[self.disk], slabs=8, record_buffers=8, breakers=NEVER, reader_threads=3)
        self.store = open_store(**(settings | changes))
        self.now_s = 0.0

    def fill(self, *numbers: int) -> None:
        for number in numbers:
            put(self.store, number)
            settle(self.store)

    def hang(self, number: int) -> None:
        self.disk.stuck.add(4096 + self.store.lookup(key(number)).slab * self.store.layout.slab_bytes)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.tick(self.now_s)

    def poll_until(self, condition) -> list[ReadTicket]:
        """Poll, without letting time pass."""
        reads: list[ReadTicket] = []
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline
            reads += self.store.poll().reads
            time.sleep(0.0005)
        return reads

    def check_all_back(self) -> None:
        def back() -> bool:
            self.tick(ASK_AGAIN_S)
            stats = self.store.stats()
            return stats.buffers_free == stats.buffers_total and stats.slabs_used == stats.entries

        self.poll_until(back)
        assert [(root.stuck_reads, root.stuck_writes) for root in self.store.stats().roots] == [(0, 0)]


def test_one_stuck_reader_does_not_stop_the_others():
    bench = Bench()
    bench.fill(1, 2, 3)
    bench.hang(1)
    stuck = bench.store.begin_read(key(1))
    others = [bench.store.begin_read(key(number)) for number in (2, 3)]
    bench.disk.wait_hanging(1)
    while not all(ticket.finished for ticket in others):
        time.sleep(0.0005)  # a few real milliseconds, before the agreed time goes on
    bench.tick(0.0)
    bench.tick(LIMIT_S / 2)
    bench.store.poll()
    assert [ticket.ok for ticket in (stuck, *others)] == [None] * 3, "commits are in order"
    bench.tick(LIMIT_S / 2)
    bench.poll_until(lambda: all(ticket.ok for ticket in others))
    assert stuck.ok is False and stuck.miss_reason is MissReason.TIMED_OUT
    assert all((ticket.record.payload == number).all() for ticket, number in zip(others, (2, 3), strict=True))
    for ticket in others:
        bench.store.release(ticket)
    stats = bench.store.stats()
    assert stats.buffers_free == stats.buffers_total - 1 and stats.roots[0].stuck_reads == 1
    for _ in range(5):  # and the threads that are left go on serving
        ticket = bench.store.begin_read(key(2))
        bench.poll_until(lambda ticket=ticket: ticket.ok)
        bench.store.release(ticket)
    bench.disk.release()
    bench.check_all_back()
    bench.store.close()


def test_what_comes_late_is_not_delivered():
    """The place that it was for belongs to somebody else by then."""
    bench = Bench()
    bench.fill(1)
    bench.hang(1)
    delivered = []
    ticket = bench.store.begin_read(key(1), deliver=lambda *_: delivered.append(1))
    bench.disk.wait_hanging(1)
    bench.tick(0.0)
    bench.tick(LIMIT_S)
    bench.poll_until(lambda: ticket.ok is False)
    bench.disk.release()
    bench.check_all_back()
    assert not delivered
    bench.store.close()


def test_a_buffer_that_a_stuck_thread_may_fill_is_not_given_to_others():
    bench = Bench(record_buffers=2, slabs=8)
    bench.fill(1, 2)
    bench.hang(1)
    stuck = bench.store.begin_read(key(1))
    buffer = stuck.record.buffer_id
    bench.disk.wait_hanging(1)
    bench.tick(0.0)
    bench.tick(LIMIT_S)
    bench.poll_until(lambda: stuck.ok is False)
    for _ in range(3):
        bench.tick(ASK_AGAIN_S)
        bench.store.poll()
        record = bench.store.acquire_record()
        assert record.buffer_id != buffer and bench.store.acquire_record() is None
        bench.store.release_record(record)
    bench.disk.release()
    bench.check_all_back()
    bench.store.close()


def test_when_all_readers_hang_what_waits_is_given_up_too():
    bench = Bench(reader_threads=2)
    bench.fill(1, 2, 3, 4)
    for number in (1, 2):
        bench.hang(number)
    tickets = [bench.store.begin_read(key(number)) for number in (1, 2, 3, 4)]
    bench.disk.wait_hanging(2)
    bench.tick(0.0)
    bench.tick(LIMIT_S)
    bench.poll_until(lambda: all(ticket.ok is False for ticket in tickets))
    assert {ticket.miss_reason for ticket in tickets} == {MissReason.TIMED_OUT}
    bench.tick(ASK_AGAIN_S)
    bench.store.poll()
    assert bench.store.stats().buffers_free == 6, "those that no thread began are back"
    bench.disk.release()
    bench.check_all_back()
    bench.fill(5)
    ticket = bench.store.begin_read(key(5))
    bench.poll_until(lambda: ticket.ok)
    bench.store.release(ticket)
    bench.store.close()


def test_a_stuck_writer_takes_a_bounded_number_of_buffers():
    """vLLM's and llm-d's queues grew without bound: llm-d/llm-d-kv-cache#457."""
    bench = Bench(record_buffers=6, slabs=12)
    bench.fill(1)
    bench.disk.writes_allowed.clear()
    bench.disk.write_entered.clear()
    taken = 0
    while not isinstance(record := bench.store.claim_record(key(10 + taken), None), PutResult):
        assert bench.store.put(key(10 + taken), 64, record) is PutResult.STORED
        taken += 1
        assert taken <= 6
    assert record is PutResult.NO_BUFFER and bench.store.stats().puts[PutResult.NO_BUFFER] == 1
    assert bench.store.stats().buffers_free == 1, "reads have a buffer still"
    ticket = bench.store.begin_read(key(1))
    bench.poll_until(lambda: ticket.ok)
    bench.store.release(ticket)
    assert bench.disk.write_entered.wait(5)
    bench.tick(0.0)
    bench.tick(LIMIT_S)
    bench.tick(LIMIT_S)
    bench.poll_until(lambda: bench.store.stats().drops.get(DropReason.TIMED_OUT) == taken)
    bench.tick(ASK_AGAIN_S)
    bench.store.poll()
    stats = bench.store.stats()
    assert stats.roots[0].stuck_writes == 1 and stats.buffers_free == 5
    assert stats.slabs_used == 2, "one entry, and the slab that a late write may still change"
    bench.disk.writes_allowed.set()
    bench.check_all_back()
    bench.fill(30)
    ticket = bench.store.begin_read(key(30))
    bench.poll_until(lambda: ticket.ok)
    bench.store.release(ticket)
    bench.store.close()


def test_a_slow_write_that_makes_progress_is_not_given_up():
    bench = Bench()
    bench.disk.writes_allowed.clear()
    bench.disk.write_entered.clear()
    put(bench.store, 1)
    (write,) = bench.store._writes
    assert bench.disk.write_entered.wait(5)
    for _ in range(6):
        bench.tick(LIMIT_S * 0.9)
        write.steps += 1  # a piece
    assert not write.finished
    bench.disk.writes_allowed.set()
    settle(bench.store)
    assert bench.store.lookup(key(1)) is not None
    bench.store.close()


def test_what_has_ended_is_never_late_however_long_the_scheduler_was_busy():
    bench = Bench()
    bench.fill(1)
    bench.tick(0.0)
    ticket = bench.store.begin_read(key(1))
    put(bench.store, 2)
    deadline = time.monotonic() + 5
    while bench.store.completed() != (2, 1):
        assert time.monotonic() < deadline
    bench.tick(100 * LIMIT_S)
    bench.store.poll()
    assert ticket.ok and bench.store.lookup(key(2)) is not None
    bench.store.release(ticket)
    bench.check_all_back()
    bench.store.close()


def test_a_disk_that_hangs_is_left_alone_after_a_few_reads(caplog):
    bench = Bench(breakers=BreakerRules(read_failures=2, pause_puts=1000), reader_threads=2)
    bench.fill(1, 2, 3)
    bench.disk.stuck.update({0, *(4096 + slab * SLAB for slab in range(8))})
    tickets = [bench.store.begin_read(key(number)) for number in (1, 2)]
    bench.disk.wait_hanging(2)
    bench.tick(0.0)
    bench.tick(LIMIT_S)
    bench.poll_until(lambda: all(ticket.ok is False for ticket in tickets))
    assert "is given up" in caplog.text and "the last reads failed (timed_out)" in caplog.text
    assert bench.store.begin_read(key(3)) is MissReason.ROOT_DOWN
    for _ in range(4):  # probes hang, or wait for a thread, and are given up in their turn
        bench.tick(6.0)
        bench.store.poll()
    assert bench.store.begin_read(key(3)) is MissReason.ROOT_DOWN
    bench.disk.release()

    def back() -> bool:
        bench.tick(6.0)
        return not isinstance(bench.store.begin_read(key(3)), MissReason)

    bench.poll_until(back)
    settle(bench.store)
    bench.store.close()


@pytest.mark.parametrize("stuck", ["reader", "writer", "both"])
def test_close_returns_within_its_limit(stuck: str):
    disks = [GatedDisk(), GatedDisk()]
    store = open_store(disks=disks, slabs=8, record_buffers=8)
    for number in range(6):
        put(store, number)
        settle(store)
    disks[1].reads_allowed.clear()
    disks[1].writes_allowed.clear()
    if stuck in ("reader", "both"):
        for number in range(6):
            store.begin_read(key(number))
    if stuck in ("writer", "both"):
        for number in range(10, 12):
            put(store, number)
    time.sleep(0.05)
    started = time.monotonic()
    store.close(deadline_s=0.5)
    assert time.monotonic() - started < 1.5
    assert disks[0].closed and not disks[1].closed, "the good root is left in order"
    for disk in disks:
        disk.reads_allowed.set()
        disk.writes_allowed.set()


def test_close_does_not_wait_for_a_sync_that_hangs(monkeypatch):
    monkeypatch.setattr("sglang_histate.store.closing.SHUT_S", 0.2)
    disk, hang = FakeDisk(), threading.Event()
    store = open_store(disk=disk)
    put(store, 1)
    settle(store)
    disk.sync = lambda: hang.wait(10)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 1.0
    hang.set()


def test_ranks_give_up_alike():
    """One rank's disk hangs, the other's does not: both see a miss, and both get the buffer back in the same commit."""
    disks = [GatedDisk(), GatedDisk()]
    stores = [open_store(disks=[disk], slabs=8, record_buffers=4, breakers=NEVER) for disk in disks]

    now_s = 0.0

    def agree() -> None:
        for store in stores:
            store.tick(now_s)
        counts = [store.completed() for store in stores]
        upto = tuple(map(min, zip(*counts, strict=True)))
        outcomes = [store.outcomes(*upto) for store in stores]
        writes = [all(flags) for flags in zip(*(o[0] for o in outcomes), strict=True)]
        reads = [all(flags) for flags in zip(*(o[1] for o in outcomes), strict=True)]
        for store in stores:
            store.commit(writes, reads)
        states = [store.logical_state() for store in stores]
        assert states[0] == states[1]

    def agree_until(condition: Callable[[], bool], step_s: float = 0.0) -> None:
        nonlocal now_s
        deadline = time.monotonic() + 30
        while not condition():
            now_s += step_s
            agree()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    for store in stores:
        put(store, 1)
        put(store, 2)
    agree_until(lambda: all(store.outstanding == 0 for store in stores))
    disks[0].stuck.add(4096 + stores[0].lookup(key(1)).slab * stores[0].layout.slab_bytes)
    tickets = [store.begin_read(key(1)) for store in stores]
    for store in stores:
        put(store, 3)
    disks[0].wait_hanging(1)
    agree_until(lambda: all(store.stats().writes_queued == 0 for store in stores))
    for _ in range(30):
        now_s += 0.5
        agree()
    assert [ticket.ok for ticket in tickets] == [False, False]
    assert [store.stats().buffers_free for store in stores] == [3, 3]
    disks[0].release()
    agree_until(lambda: [store.stats().buffers_free for store in stores] == [4, 4], step_s=0.5)
    assert [store.stats().misses for store in stores] == [
        {MissReason.TIMED_OUT: 1},
        {MissReason.OTHER_RANK: 1},
    ]
    for store in stores:
        store.close()


def test_a_task_has_one_last_word():
    task: Task[MissReason] = Task()
    assert task.begin() and task.running
    assert task.give_up(MissReason.TIMED_OUT) and not task.give_up(MissReason.TIMED_OUT)
    task.finish(None)
    assert not task.running and task.failure is MissReason.TIMED_OUT and not task.succeeded()
    assert not task.begin()
    with task.sealed() as allowed:
        assert not allowed
    other: Task[MissReason] = Task()
    other.begin()
    with other.sealed() as allowed:
        assert allowed and not other.give_up(MissReason.TIMED_OUT)
    other.finish(None)
    assert other.succeeded() and not other.give_up(MissReason.TIMED_OUT)
