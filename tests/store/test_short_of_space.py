"""A gigabyte for 64 MiB: the directory never outgrows its cap, and what is worth most is still there at the end.

The order of eviction is the policy's own; the values that the store is told are what the policy's tree says of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from sglang_histate.policy.capture_value import cost_tokens
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.units import Pool
from sglang_histate.store import (
    CheckpointStore,
    DropReason,
    Key,
    PutResult,
    Record,
    RecordKind,
    RecordLayout,
    WriteLimits,
)
from sglang_histate.store.fault_plan import FaultPlan
from sglang_histate.store.faults import FaultyDisk

from .fakes import FakeDisk

MIB = 1 << 20
CAP = 64 * MIB
KV_TOKEN_BYTES = 1024
LONG, SHORT = 8192, 64  # tokens that a checkpoint saves
STEP_S = 0.005  # one megabyte each: 200 MiB/s are offered
NOW = 1_700_000_000.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Sessions:
    """One checkpoint each, at the end of its only turn; a radix tree's mirror, and the queue over it."""

    def __init__(self, slab_bytes: int) -> None:
        self.tree = PrefixTree()
        self.queue = EvictionQueue(self.tree, Pool(Tier.SSD, slab_bytes, 0), KV_TOKEN_BYTES)
        self.store: CheckpointStore | None = None
        self._slab_bytes = slab_bytes
        self._clock = 0

    def begin(self, number: int, tokens: int) -> float:
        """A session asks for the first time; return what its checkpoint will be worth, in tokens per byte."""
        self.tree.add(number, 0, tokens)
        self.used(number)
        return cost_tokens(tokens, 0, None, tokens, self.tree.end_share.value) / self._slab_bytes

    def used(self, number: int) -> None:
        self._clock += 1
        self.tree.touch(number, self.tree.tokens(number), self._clock)

    def hooks(self) -> dict:
        return {"choose_victim": self._victim, "on_present": self._present, "on_gone": self._gone}

    def _present(self, name: bytes, kind: RecordKind) -> None:
        self._set(name, True)

    def _gone(self, name: bytes, kind: RecordKind, reason: DropReason) -> None:
        self._set(name, False)

    def _set(self, name: bytes, present: bool) -> None:
        number = int.from_bytes(name, "big")
        self.tree.set_checkpoint(number, self.tree.tokens(number), Tier.SSD, present)

    def _victim(self) -> Key | None:
        unit = self.queue.victim(lambda unit: self.store.replaceable(Key(key(unit.checkpoint[0]))))
        return None if unit is None else Key(key(unit.checkpoint[0]))


def opened(layout: RecordLayout, sessions: Sessions, size_bytes: int, **settings) -> CheckpointStore:
    store = CheckpointStore.open(
        roots=settings.pop("roots", [Path("unused")]),
        allow_any_filesystem=True,
        fingerprint={"model": "test"},
        rank_name="tp0of1-pp0of1",
        size_bytes=size_bytes,
        layout=layout,
        record_buffers=settings.pop("buffers", 8),
        **sessions.hooks(),
        **settings,
    )
    sessions.store = store
    return store


def directory_bytes(root: Path) -> int:
    """What the directory takes, as `du` sees it and as its files say, whichever is more."""
    facts = [path.stat() for path in root.rglob("*") if path.is_file()]
    return max(sum(one.st_size for one in facts), sum(one.st_blocks * 512 for one in facts))


def claim(store: CheckpointStore, number: int, value: float) -> Record | PutResult:
    while (found := store.claim_record(key(number), value)) is PutResult.NO_BUFFER:
        store.poll()
        time.sleep(0.0002)
    return found


@pytest.mark.parametrize("rate", [None, 50 * MIB])
def test_64_mib_hold_what_is_worth_most_of_a_gibibyte(tmp_path: Path, rate: int | None):
    layout = RecordLayout((MIB - 4096,))
    assert layout.slab_bytes == MIB
    root, sessions = tmp_path / "ssd", Sessions(MIB)
    store = opened(layout, sessions, CAP, roots=[root], write_limits=WriteLimits(bytes_per_s=rate))
    valued, highest, offered, step, hits, misses = range(1, 21), 0, 0, 0, 0, 0
    for number in valued:
        sessions.tree.add(number, 0, LONG)
    value = cost_tokens(LONG, 0, None, LONG, sessions.tree.end_share.value) / MIB
    while offered < 1024 * MIB:
        step += 1
        store.tick(NOW + step * STEP_S)
        # Each valued session comes back every hundred requests, long after an order of use would have forgotten it.
        number = valued[step // 5 % 20] if step % 5 == 0 else 1000 + step
        worth = value if number in valued else sessions.begin(number, SHORT)
        if store.lookup(key(number)) is not None:
            hits += 1
            sessions.used(number)
            store.touch(key(number))
        else:
            misses += number in valued
            if number in valued:
                sessions.used(number)
            record = claim(store, number, worth)
            offered += MIB
            if isinstance(record, Record):
                record.payload[:] = number % 251
                store.put(key(number), sessions.tree.tokens(number), record)
        store.poll()
        highest = max(highest, directory_bytes(root) if step % 16 == 0 else 0)
        assert store.stats().bytes_used <= CAP
    while store.outstanding:
        store.poll()
        time.sleep(0.001)
    assert 0 < highest <= CAP and directory_bytes(root) <= CAP
    assert hits > 10 * misses, (hits, misses)
    for number in valued:
        ticket = store.begin_read(key(number))
        while ticket.ok is None:
            store.poll()
        assert ticket.ok and (ticket.record.payload == number % 251).all()
        store.release(ticket)
    stats = store.stats()
    if rate is None:
        assert stats.bytes_written >= 1024 * MIB
    else:
        assert stats.bytes_written <= rate * step * STEP_S + stats.writes.burst_bytes
        assert stats.bytes_written >= 0.9 * rate * step * STEP_S, "the rate is used"
        assert stats.puts[PutResult.LOW_VALUE] > stats.puts.get(PutResult.WRITE_BUDGET, 0)
    store.close()


def test_an_order_of_use_alone_would_have_lost_it(tmp_path: Path):
    """What the test above would be worth if anything did."""
    layout = RecordLayout((4096,))
    store = CheckpointStore.open(
        roots=[Path("unused")], fingerprint={}, rank_name="r", size_bytes=4096 + 63 * layout.slab_bytes,
        layout=layout, record_buffers=8, disks=[FakeDisk()],
    )  # fmt: skip
    hits = 0
    for step in range(1, 1025):
        number = 1 + step // 5 % 20 if step % 5 == 0 else 1000 + step
        if store.lookup(key(number)) is not None:
            hits += 1
            store.touch(key(number))
        else:
            store.put(key(number), 64, claim(store, number, 0.0))
        store.poll()
    assert hits == 0
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_ranks_with_different_disks_refuse_and_give_up_the_same(seed: int):
    layout = RecordLayout((12288,))
    slab = layout.slab_bytes
    limits = WriteLimits(bytes_per_s=40 * slab, bytes_per_day=200 * slab, queue_age_s=0.05)
    ranks, policies = [], []
    for number, delay_ms in enumerate((0.0, 6.0, 2.0)):
        sessions = Sessions(slab)
        disk = FaultyDisk(FakeDisk(), FaultPlan(), seed=f"{seed} {number}", delay_s=delay_ms / 1000)
        ranks.append(
            opened(layout, sessions, 4096 + 20 * slab, disks=[disk], buffers=30, write_limits=limits)
        )
        policies.append(sessions)
    draw = random.Random(seed)
    started_s = [time.monotonic() - late for late in (0.0, 0.3, 0.1)]
    results: Counter[PutResult] = Counter()
    begun: set[int] = set()
    for step in range(700):
        now_s = min(time.monotonic() - start_s for start_s in started_s)
        number = draw.choice((draw.randrange(1, 12), 100 + step))
        tokens = LONG if number < 12 else draw.choice((SHORT, 512))
        values = [
            cost_tokens(tokens, 0, None, tokens, 0.5) / slab
            if number in begun
            else policy.begin(number, tokens)
            for policy in policies
        ]
        begun.add(number)
        for store in ranks:
            store.tick(NOW + now_s)
        assert len(set(values)) == 1
        found = [store.claim_record(key(number), values[0]) for store in ranks]
        kinds = {type(one) if isinstance(one, Record) else one for one in found}
        assert len(kinds) == 1, kinds
        if isinstance(found[0], Record):
            outcomes = {
                store.put(key(number), tokens, record) for store, record in zip(ranks, found, strict=True)
            }
            assert len(outcomes) == 1, outcomes
            results.update(outcomes)
        else:
            results[found[0]] += 1
        if draw.random() < 0.3:
            upto = tuple(map(min, zip(*(store.completed() for store in ranks), strict=True)))
            flags = [store.outcomes(*upto)[0] for store in ranks]
            agreed = [all(ok) for ok in zip(*flags, strict=True)]
            for store in ranks:
                store.commit(agreed, [])
        states = [store.logical_state() for store in ranks]
        assert all(state == states[0] for state in states)
        if draw.random() < 0.2:
            time.sleep(0.003)
    stats = [store.stats() for store in ranks]
    assert all(dict(one.puts) == dict(stats[0].puts) for one in stats)
    assert all(dict(one.cancelled) == dict(stats[0].cancelled) for one in stats)
    assert all(one.writes == stats[0].writes for one in stats)
    assert {PutResult.STORED, PutResult.QUEUE_AGE, PutResult.LOW_VALUE} <= set(results), results
    assert stats[0].drops[DropReason.QUEUE_AGE] > 0, (
        "something worth more took the place of something that waited"
    )
    for store in ranks:
        store.close()
