"""A read waits for one piece of a write at most, in every root, and not at all for the writes of another root."""

from __future__ import annotations

import threading
import time

import pytest

from sglang_histate.store import RecordLayout
from sglang_histate.store.writer import PIECE_BYTES

from .conftest import key, open_store
from .fakes import FakeDisk

PIECES = 3
LAYOUT = RecordLayout((PIECES * PIECE_BYTES - 4096,))


class OneAtATime(FakeDisk):
    """Like a drive with a queue depth of one: a transfer begins when the one before has ended.

    `order` lists what began. Each piece of a write waits for `step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.gated = False
        self._steps = threading.Semaphore(0)
        self._busy = threading.Lock()

    def read_at(self, buffers, offset):
        with self._busy:
            self.order.append("read")
            return super().read_at(buffers, offset)

    def write_at(self, buffers, offset):
        assert sum(map(len, buffers)) <= PIECE_BYTES
        with self._busy:
            self.order.append("write")
            if self.gated:
                assert self._steps.acquire(timeout=10)
            return super().write_at(buffers, offset)

    def step(self) -> None:
        """Let one piece be written."""
        self._steps.release()

    def wait_for(self, order: list[str]) -> None:
        deadline = time.monotonic() + 5
        while self.order != order:
            assert time.monotonic() < deadline, self.order
            time.sleep(0.0002)


def settle(store) -> None:
    deadline = time.monotonic() + 20
    while store.outstanding:
        store.poll()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fill(store, *numbers: int) -> None:
    for number in numbers:
        record = store.acquire_record()
        record.payload[:] = number
        store.put(key(number), 64, record)


@pytest.mark.parametrize("n_roots", [1, 2])
def test_a_read_waits_for_one_piece(monkeypatch, n_roots: int):
    # The writer's patience must not end on a busy machine while this test counts.
    monkeypatch.setattr("sglang_histate.store.writer.YIELD_TO_READS_S", 10.0)
    disks = [OneAtATime() for _ in range(n_roots)]
    store = open_store(
        disks=disks,
        layout=LAYOUT,
        size_bytes=n_roots * (4096 + 3 * LAYOUT.slab_bytes),
        record_buffers=8,
        reader_threads=2,
    )
    fill(store, *range(2 * n_roots))  # two in each root
    settle(store)
    for disk in disks:
        disk.gated, disk.order = True, []
    fill(store, *range(10, 10 + n_roots))
    for root, disk in enumerate(disks):
        disk.wait_for(["write"])  # the first piece is on its way
        numbers = [n for n in range(2 * n_roots) if store.lookup(key(n)).slab % n_roots == root]
        assert len(numbers) == 2
        tickets = [store.begin_read(key(number)) for number in numbers]
        disk.step()
        while not all(ticket.finished for ticket in tickets):
            time.sleep(0.0005)
        reads = disk.order.count("read")
        assert disk.order[: 1 + reads] == ["write"] + ["read"] * reads, (
            "no second piece came before the reads"
        )
        store.poll()
        for ticket, number in zip(tickets, numbers, strict=True):
            assert ticket.ok and (ticket.record.payload == number).all()
            store.release(ticket)
    for disk in disks:
        for _ in range(PIECES):
            disk.step()
    settle(store)
    for disk in disks:
        assert disk.order.count("write") == PIECES
        disk.gated = False
    store.close()


def test_a_root_does_not_wait_for_another():
    """The writer of one root hangs in the middle of a record: reads and writes of the other go on."""
    disks = [OneAtATime(), OneAtATime()]
    store = open_store(
        disks=disks, layout=LAYOUT, size_bytes=2 * (4096 + 3 * LAYOUT.slab_bytes), record_buffers=8
    )
    fill(store, 0, 1)
    settle(store)
    (there,) = [number for number in (0, 1) if store.lookup(key(number)).slab % 2 == 1]
    disks[0].gated = True
    disks[0].order, disks[1].order = [], []
    fill(store, 10, 11)
    disks[0].wait_for(["write"])
    ticket = store.begin_read(key(there))
    deadline = time.monotonic() + 5
    while not (ticket.finished and disks[1].order.count("write") == PIECES):
        assert time.monotonic() < deadline, disks[1].order
        time.sleep(0.0005)
    assert disks[0].order == ["write"]
    for _ in range(PIECES):
        disks[0].step()
    settle(store)
    assert ticket.ok
    store.release(ticket)
    disks[0].gated = False
    store.close()
