"""Ranks with different disks, driven by the same calls, must agree on everything at every step."""

from __future__ import annotations

import random
import time

import pytest

from sglang_histate.store import MissReason, ReadTicket
from sglang_histate.store.faults import FaultyDisk

from .conftest import key, open_store
from .fakes import FakeDisk


class Ranks:
    """What an adapter does with several ranks: the same call on each, agreed commits."""

    def __init__(self, disks: list, **changes) -> None:
        self.stores = [open_store(disk=FakeDisk(), **changes) for _ in disks]
        for store, disk in zip(self.stores, disks, strict=True):
            disk._inner = store._disk
            store._reader._disk = store._writer._disk = disk
        self.tickets: list[list[ReadTicket]] = []

    def agree(self):
        counts = [store.completed() for store in self.stores]
        upto = tuple(map(min, zip(*counts, strict=True)))
        outcomes = [store.outcomes(*upto) for store in self.stores]
        writes = [all(flags) for flags in zip(*(o[0] for o in outcomes), strict=True)]
        reads = [all(flags) for flags in zip(*(o[1] for o in outcomes), strict=True)]
        return [store.commit(writes, reads) for store in self.stores]

    def same(self, values: list):
        assert all(value == values[0] for value in values), values
        return values[0]

    def check(self) -> None:
        self.same([store.logical_state() for store in self.stores])


@pytest.mark.parametrize("fault_rate", [0.0, 0.2])
def test_ranks_agree_at_every_step(fault_rate: float):
    disks = [
        FaultyDisk(None, delay_ms=delay, fault_rate=fault_rate, seed=f"tp{n}")
        for n, delay in enumerate((0.1, 4.0, 1.0))
    ]
    ranks = Ranks(disks, slabs=6, record_buffers=5)
    draw = random.Random(5)
    waiting: list[list[ReadTicket]] = []
    hits = misses = 0
    for step in range(900):
        number, action = draw.randrange(12), draw.random()
        if action < 0.3:
            records = [store.acquire_record() for store in ranks.stores]
            if ranks.same([record is None for record in records]):
                continue
            ranks.same([record.buffer_id for record in records])
            for rank, record in enumerate(records):
                record.payload[:] = (number + rank) % 256
            ranks.same(
                [store.put(key(number), 64, r) for store, r in zip(ranks.stores, records, strict=True)]
            )
        elif action < 0.6:
            tickets = [store.begin_read(key(number)) for store in ranks.stores]
            if isinstance(tickets[0], MissReason):
                ranks.same(tickets)
            else:
                ranks.same([ticket.record.buffer_id for ticket in tickets])
                waiting.append(tickets)
        elif action < 0.65 and waiting:
            tickets = waiting.pop(draw.randrange(len(waiting)))
            for store, ticket in zip(ranks.stores, tickets, strict=True):
                store.cancel_read(ticket)
        elif action < 0.655:
            for store in ranks.stores:
                store.clear()
        elif action < 0.7:
            for store in ranks.stores:
                store.touch(key(number))
        else:
            done = ranks.agree()
            ranks.same([[ticket.key for ticket in committed.reads] for committed in done])
            ranks.same([[write.key for write in committed.writes] for committed in done])
        for tickets in [t for t in waiting if t[0].ok is not None]:
            waiting.remove(tickets)
            ok = ranks.same([ticket.ok for ticket in tickets])
            hits, misses = hits + ok, misses + (not ok)
            for rank, (store, ticket) in enumerate(zip(ranks.stores, tickets, strict=True)):
                if ok:
                    expected = (int.from_bytes(ticket.key, "big") + rank) % 256
                    assert (ticket.record.payload == expected).all()
                store.release(ticket)
        ranks.check()
        if step % 2 == 0:
            time.sleep(0.002)
    assert hits > 20 and (misses > 5 or fault_rate == 0)
    deadline = time.monotonic() + 10
    while any(store.stats().writes_queued or store.stats().reads_in_flight for store in ranks.stores):
        ranks.agree()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for tickets in waiting:
        for store, ticket in zip(ranks.stores, tickets, strict=True):
            store.release(ticket)
    ranks.check()
    for store in ranks.stores:
        stats = store.stats()
        assert stats.buffers_free == stats.buffers_total and stats.slabs_used == stats.entries
        store.close()
