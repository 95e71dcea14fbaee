"""Ranks with different disks, driven by the same calls, must agree on everything at every step."""

from __future__ import annotations

import random
import time

import pytest

from sglang_histate.store import NO_PARENT, DropReason, Key, MissReason, PutResult, ReadTicket, RecordKind
from sglang_histate.store.fault_plan import FaultPlan
from sglang_histate.store.faults import FaultyDisk
from sglang_histate.store.roots import BreakerRules

from .conftest import fill_extent, is_extent, key, open_store, page_keys
from .fakes import FakeDisk


class Policy:
    """Replaces extents before checkpoints, the newest first: nothing like the default."""

    def __init__(self) -> None:
        self.present: dict[Key, None] = {}
        self.heard: list[tuple] = []
        self.store = None

    def on_present(self, hashed: bytes, kind: RecordKind) -> None:
        self.heard.append((hashed, kind))
        self.present[Key(hashed, kind)] = None

    def on_gone(self, hashed: bytes, kind: RecordKind, reason: DropReason) -> None:
        self.heard.append((hashed, kind, reason))
        del self.present[Key(hashed, kind)]

    def choose(self) -> Key | None:
        names = list(filter(self.store.replaceable, reversed(self.present)))
        return min(names, key=lambda name: name.kind is RecordKind.CHECKPOINT, default=None)


class Ranks:
    """What an adapter does with several ranks: the same call on each, agreed commits."""

    def __init__(self, disks: list[list[FaultyDisk]], with_policy: bool, **changes) -> None:
        """`disks`: those of each rank."""
        self.disks = disks
        self.now_s = 1000.0
        self.policies = [Policy() for _ in disks]
        self.stores = [
            open_store(
                disks=mine,
                on_present=policy.on_present,
                on_gone=policy.on_gone,
                choose_victim=policy.choose if with_policy else None,
                **changes,
            )
            for policy, mine in zip(self.policies, disks, strict=True)
        ]
        for policy, store in zip(self.policies, self.stores, strict=True):
            policy.store = store
        self.tickets: list[list[ReadTicket]] = []

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for store in self.stores:
            store.tick(self.now_s)

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
        self.same([policy.heard for policy in self.policies])
        self.same([[dict(p.puts) for p in store.stats().kinds.values()] for store in self.stores])


@pytest.mark.parametrize("with_policy", [False, True])
@pytest.mark.parametrize(("fault_rate", "n_roots"), [(0.0, 1), (0.2, 1), (0.2, 2)])
def test_ranks_agree_at_every_step(fault_rate: float, n_roots: int, with_policy: bool):
    disks = [
        [
            FaultyDisk(FakeDisk(), FaultPlan(), seed=f"tp{n}/{root}", root=root, delay_s=delay_s)
            for root in range(n_roots)
        ]
        for n, delay_s in enumerate((0.0001, 0.004, 0.001))
    ]
    rules = BreakerRules(write_failures=4, read_failures=4, pause_puts=3)
    ranks = Ranks(disks, with_policy, slabs=6, record_buffers=5, breakers=rules)
    for disk in (disk for mine in disks for disk in mine):
        disk.plan = FaultPlan.bad_reads(fault_rate)
    draw = random.Random(5)
    bad_luck = [random.Random(100 + rank) for rank in range(3)]
    content: dict[Key, tuple[int, int]] = {}  # fill and pages of the newest record; the fill differs by rank
    waiting: list[tuple[list[ReadTicket], tuple[int, int]]] = []
    hits = {kind: 0 for kind in RecordKind}
    misses = 0
    for step in range(900):
        kind = draw.choice(list(RecordKind))
        number, action = draw.randrange(8), draw.random()
        if action < 0.3:
            records = [store.acquire_record() for store in ranks.stores]
            if ranks.same([record is None for record in records]):
                continue
            ranks.same([record.buffer_id for record in records])
            fill, n_pages = step % 256, draw.randrange(1, 5)
            results = [
                put(store, number, kind, record, fill + rank, n_pages)
                for rank, (store, record) in enumerate(zip(ranks.stores, records, strict=True))
            ]
            if ranks.same(results) is PutResult.STORED:
                content[Key(key(number), kind)] = fill, n_pages
        elif action < 0.6:
            tickets = [store.begin_read(key(number), kind=kind) for store in ranks.stores]
            if isinstance(tickets[0], MissReason):
                ranks.same(tickets)
            else:
                ranks.same([ticket.record.buffer_id for ticket in tickets])
                waiting.append((tickets, content[Key(key(number), kind)]))
        elif action < 0.65 and waiting:
            tickets, _ = waiting.pop(draw.randrange(len(waiting)))
            for store, ticket in zip(ranks.stores, tickets, strict=True):
                store.cancel_read(ticket)
        elif action < 0.655:
            for store in ranks.stores:
                store.clear()
        elif action < 0.68:
            for store in ranks.stores:
                store.touch(key(number), kind)
        elif action < 0.7:
            ranks.same([store.drop(key(number), DropReason.ORPHANED, kind=kind) for store in ranks.stores])
        else:
            done = ranks.agree()
            ranks.same([[(t.key, t.kind) for t in committed.reads] for committed in done])
            ranks.same([[(write.key, write.kind) for write in committed.writes] for committed in done])
        if draw.random() < 0.2:
            ranks.tick(draw.choice([0.1, 1.0, 4.0]))
        for mine, luck in zip(disks, bad_luck, strict=True):
            if luck.random() < fault_rate / 4:
                luck.choice(mine).inner.write_faults.append(
                    luck.choice(["eio", "enospc", ("tear", luck.randrange(32)), ("short", 5)])
                )
        for tickets, (fill, n_pages) in [w for w in waiting if w[0][0].ok is not None]:
            waiting.remove((tickets, (fill, n_pages)))
            ok = ranks.same([ticket.ok for ticket in tickets])
            hits[tickets[0].kind] += ok
            misses += not ok
            for rank, (store, ticket) in enumerate(zip(ranks.stores, tickets, strict=True)):
                if ok:
                    assert holds(ticket, fill + rank, n_pages)
                store.release(ticket)
        ranks.check()
        if step % 2 == 0:
            time.sleep(0.002)
    assert min(hits.values()) > 0 and (misses > 0 or fault_rate == 0)  # how many is a matter of threads
    deadline = time.monotonic() + 10
    while any(store.stats().writes_queued or store.stats().reads_in_flight for store in ranks.stores):
        ranks.agree()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for tickets, _ in waiting:
        for store, ticket in zip(ranks.stores, tickets, strict=True):
            store.release(ticket)
    ranks.check()
    for store in ranks.stores:
        stats = store.stats()
        assert stats.buffers_free == stats.buffers_total and stats.slabs_used == stats.entries
        assert all(part.drops.get(DropReason.EVICTED) for part in stats.kinds.values()) or with_policy
        store.close()
    ranks.same([policy.heard for policy in ranks.policies])
    assert not any(policy.present for policy in ranks.policies)


def put(store, number: int, kind: RecordKind, record, fill: int, n_pages: int):
    if kind is RecordKind.CHECKPOINT:
        record.payload[:] = fill % 256
        return store.put(key(number), 64, record)
    fill_extent(record, n_pages, fill)
    return store.put_extent(page_keys(number, n_pages), 64, record, parent=NO_PARENT)


def holds(ticket: ReadTicket, fill: int, n_pages: int) -> bool:
    if ticket.kind is RecordKind.CHECKPOINT:
        return bool((ticket.record.payload == fill % 256).all())
    return ticket.n_pages == n_pages and is_extent(ticket.record, n_pages, fill)
