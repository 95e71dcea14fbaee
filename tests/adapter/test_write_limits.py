"""What the server does when the SSD may not be written: nothing is copied for nothing, nothing spins, nothing stays held."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter import tier
from sglang_histate.adapter.agreed_time import AgreedTime, agree_on_written
from sglang_histate.adapter.counters import Drop
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.store import DropReason, PutResult, RecordKind, WriteLimits

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import fake_disk
from .test_kv_ssd import Bench, many
from .test_tier import Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA
NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def time_in_each_step(monkeypatch) -> None:
    monkeypatch.setattr(tier, "TIME_STEPS", 1)


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def of(self, one) -> Clock:
        one._time = AgreedTime(wall=lambda: NOW, monotonic=lambda: self.now_s)
        return self


def ranked(**limits) -> tuple[Rank, Clock]:
    rank = Rank(Alone(), buffers=24, slabs=64, limits=WriteLimits(**limits))
    return rank, Clock().of(rank.tier)


def size_of(rank: Rank) -> int:
    return rank.store.layout.transfer_bytes(RecordKind.CHECKPOINT, 0)


def test_a_rate_of_nothing_captures_nothing() -> None:
    rank, _ = ranked(bytes_per_s=0)
    assert rank.prefill(request(tokens((1, 1000))), 0, 1000) is None, "nothing is copied from the device"
    assert rank.counters.dropped[Drop.REFUSED] == 4 and rank.counters.planned == 0
    assert rank.store.stats().puts == {PutResult.WRITE_BUDGET: 4}
    rank.tier._agreement = None
    rank.tier.tick()  # and nobody is asked for the time, which would change nothing
    rank.check_idle()
    rank.store.close()


def test_the_end_of_a_session_reaches_the_host_though_the_ssd_refuses_it() -> None:
    rank, _ = ranked(bytes_per_s=0)
    req = finished(rank, tokens((1, 512)))
    rank.tier.output_ends.take(req)
    rank.drain()
    assert (
        rank.published == [] and not list(rank.store.entries()) and rank.counters.dropped[Drop.REFUSED] == 1
    )
    slot = rank.engine.nodes()[0].component_data[MAMBA].host_value
    for views in rank.engine.layout.views(rank.engine.host_states.read(int(slot[0]))):
        assert (views.temporal == 512.0).all()
    rank.engine.evict_kv(4096)
    rank.check_idle()
    rank.store.close()


def test_a_refused_end_without_a_place_on_the_host_gives_its_record_back() -> None:
    rank, _ = ranked(bytes_per_s=0)
    req = finished(rank, tokens((1, 512)))
    rank.tier.output_ends.take(req)
    rank.engine.nodes()[0].component_data[MAMBA].host_value = rank.engine.slots.alloc()
    rank.drain()
    assert rank.store.records.free == rank.store.records.total
    rank.tier.output_ends.take(req)
    rank.store.close()


def test_while_bytes_are_short_interior_checkpoints_go_short_first() -> None:
    rank, clock = ranked()
    size = size_of(rank)
    rank.store.admission.budget.__init__(size, None, size)  # a record per second, five at once
    taken: dict[str, int] = {"interior": 0, "final": 0}
    for session in range(40):
        req = request(tokens((session + 1, 1000)))
        capture = rank.prefill(req, 0, 1000)
        for row in () if capture is None else capture.rows:
            taken["final" if row.position == 960 else "interior"] += 1
        rank.drain()
        clock.now_s += 2.0
    assert taken["final"] >= 38 and taken["interior"] == pytest.approx(40 * 2 + 5 - taken["final"], abs=5)
    puts = rank.store.stats().puts
    assert puts[PutResult.LOW_VALUE] > 10 and rank.counters.dropped[Drop.REFUSED] == 160 - sum(taken.values())
    rank.check_idle()
    rank.store.close()


def test_a_refused_checkpoint_makes_the_next_one_worth_more() -> None:
    rank, _ = ranked()
    asked: list[float] = []
    real = rank.store.claim_record

    def claim(key, value, **changes):
        asked.append(value * rank.engine.layout.stored_bytes)
        return real(key, value, **changes) if len(asked) != 2 else PutResult.LOW_VALUE

    rank.store.claim_record = claim
    req = request(tokens((1, 1024)))
    share = rank.engine.ranking.end_share()
    rank.prefill(req, 0, 1024)  # 256, 512, 768, 960 and 1024
    interior = (1 - share) * 256 / 1024
    assert asked[:3] == pytest.approx([256 * interior, 256 * interior, 512 * (1 - share) * 192 / 1024])
    assert asked[4] == pytest.approx(64 * share)
    assert state_of(req, PAGE).kept == 1024
    rank.drain()
    rank.store.close()


def test_what_the_store_has_already_counts_as_kept() -> None:
    rank, _ = ranked()
    rank.prefill(request(tokens((1, 600))), 0, 600)  # 256, 512, 576
    rank.drain()
    asked: list[float] = []
    real = rank.store.claim_record

    def claim(key, value, **changes):
        asked.append(value * rank.engine.layout.stored_bytes)
        return real(key, value, **changes)

    rank.store.claim_record = claim
    req = request(tokens((1, 600), (2, 424)))
    rank.prefill(req, 0, 640)
    rank.prefill(req, 640, 1024)  # 256 and 512 are there: 768, 960 and 1024 are new
    share = rank.engine.ranking.end_share()
    assert asked == pytest.approx([256 * (1 - share) * 192 / 1024, 192 * (1 - share) * 64 / 1024, 64 * share])
    rank.drain()
    rank.store.close()


def spilling(**limits) -> tuple[Bench, Clock]:
    bench = Bench(limits=WriteLimits(**limits))
    return bench, Clock().of(bench.tier)


def test_a_spill_that_is_refused_neither_spins_nor_holds_anything() -> None:
    bench, clock = spilling(bytes_per_s=1 << 40)
    many(bench, 4)
    budget = bench.store.admission.budget
    budget.bucket.level, budget.bucket.rate = 0.0, bench.store.layout.slab_bytes
    asked = []
    real = bench.store.claim_record
    bench.store.claim_record = lambda *a, **k: asked.append(a) or real(*a, **k)
    spilled = bench.counters.kv_spilled_pages
    bench.tier.kv_spill._refilling, bench.tier.kv_spill._reserve._largest = True, 40
    bench.engine.evict_kv(1 << 20)
    for _ in range(100):
        bench.tier.tick()
    assert len(asked) == 1, "one look tells that there is nothing to be had"
    assert bench.counters.kv_spills_refused == 1 and bench.counters.kv_spilled_pages == spilled
    assert bench.store.records.free == bench.store.records.total and not bench.tier.kv_spill._pending
    for _ in range(40):
        clock.now_s += 1.0
        bench.tier.tick()
        bench.drain()
    assert bench.counters.kv_spilled_pages > spilled, "it goes on when there is room for a record"
    bench.drain()
    bench.engine.check()
    bench.tier.close()


def test_spills_keep_to_the_rate() -> None:
    bench, clock = spilling(bytes_per_s=1)
    slab = bench.store.layout.slab_bytes
    bench.store.admission.budget.__init__(2 * slab, None, slab)
    sessions = []
    for number in range(1, 13):
        sessions += many(bench, number, 512)[-1:]
        clock.now_s += 1.0
        bench.settle()
        stats = bench.store.stats()
        assert stats.bytes_written <= 2 * slab * clock.now_s + 10 * slab
    bench.engine.check()
    bench.tier.close()


def aborted_prefill(rank: Rank) -> tuple[object, PageKeys]:
    """A request whose first chunk is in the tree and whose second one is captured; it is given back without."""
    ids = tokens((1, 1500))
    req = request(ids)
    rank.prefill(req, 0, 704)  # 256, 512
    rank.drain()
    rank.engine.insert(ids[:704])
    rank.engine.settle()
    node = rank.engine.match(req).best_match_node
    req.last_node, req.kv.cache_protected_len = node, 704
    rank.tier.published(req)
    return req, PageKeys(PAGE, None, None)


def test_an_aborted_request_cancels_what_lies_beyond_its_kv_in_the_tree() -> None:
    rank, _ = ranked()
    req, keys = aborted_prefill(rank)
    ids = req.full_untruncated_fill_ids
    fake_disk(rank.store).writes_allowed.clear()
    rank.prefill(req, 704, 1500)
    rank.tier.tick()
    beyond = [keys.at(ids, position) for position in (768, 1024, 1280, 1472)]
    assert all(rank.store.lookup(key) for key in beyond)
    req.full_untruncated_fill_ids = ids[:1]  # an abort may take the tokens away
    rank.tier.released(req)
    fake_disk(rank.store).writes_allowed.set()
    rank.drain()
    assert not any(rank.store.lookup(key) for key in beyond)
    assert all(rank.store.lookup(keys.at(ids, position)) for position in (256, 512)), "its KV is in the tree"
    assert rank.store.stats().cancelled == {DropReason.ABORTED: 4}
    rank.check_idle()
    rank.store.close()


def test_captures_of_an_aborted_request_that_have_not_arrived_are_not_put() -> None:
    rank, _ = ranked()
    req, _ = aborted_prefill(rank)
    rank.published.clear()
    rank.prefill(req, 704, 1500, done_after=2)
    rank.tier.released(req)
    rank.drain()
    assert rank.published == [] and rank.counters.dropped[Drop.ABORTED] == 4
    rank.check_idle()
    rank.store.close()


def test_what_is_on_the_disk_already_stays_and_so_does_what_another_request_has() -> None:
    rank, _ = ranked()
    req, keys = aborted_prefill(rank)
    ids = req.full_untruncated_fill_ids
    rank.prefill(req, 704, 1500)
    rank.drain()
    rank.tier.released(req)
    assert rank.store.lookup(keys.at(ids, 768)) is not None, "the write was made and costs nothing any more"
    fake_disk(rank.store).writes_allowed.clear()
    other = request(tokens((3, 700)))
    rank.prefill(other, 0, 700)
    rank.tier.tick()
    key = keys.__class__(PAGE, None, None).at(other.full_untruncated_fill_ids, 256)
    rank.engine.insert(tokens((3, 640)))
    node = rank.engine.match(other).best_match_node
    rank.engine.ranking.placed(key, rank.engine.cache.tree_core.node_by_id(node), 256, True)
    rank.tier.released(other)
    fake_disk(rank.store).writes_allowed.set()
    rank.drain()
    assert rank.store.lookup(key) is not None
    rank.store.close()


def test_a_request_that_is_computed_again_is_captured_again() -> None:
    rank, _ = ranked()
    req, keys = aborted_prefill(rank)
    rank.tier.released(req)
    rank.prefill(req, 704, 1500)
    rank.drain()
    assert rank.store.lookup(keys.at(req.full_untruncated_fill_ids, 768)) is not None
    rank.check_idle()
    rank.store.close()


def test_the_time_is_asked_for_only_while_it_changes_something(monkeypatch) -> None:
    monkeypatch.setattr(tier, "TIME_STEPS", 3)
    rank, clock = ranked(bytes_per_s=1 << 30)
    calls = []
    rank.tier._agreement = SimpleNamespace(minimum=lambda values: calls.append(1) or list(values))
    rank.prefill(request(tokens((1, 600))), 0, 600)
    rank.drain()
    del calls[:]
    for expected in (0, 0, 1, 1, 1, 2):
        rank.tier.tick()
        assert len(calls) == expected, "the bucket is not full, but that can wait for some steps"
    clock.now_s += 60.0
    for expected in (2, 2, 3, 3, 3, 3, 3, 3):
        rank.tier.tick()
        assert len(calls) == expected
    rank.store.close()


def test_a_snapshot_is_taken_once_a_minute() -> None:
    rank, clock = ranked(bytes_per_day=1)
    taken = []
    rank.store.snapshot = lambda: taken.append(clock.now_s)
    for _ in range(300):
        clock.now_s += 1.0
        rank.tier.tick()
    assert taken == [1.0, 61.0, 121.0, 181.0, 241.0]
    rank.store.close()


def test_agreed_time_is_the_least_of_all_ranks_and_ignores_the_wall_clock() -> None:
    wall, passed = [1000.0], [5.0]
    time = AgreedTime(wall=lambda: wall[0], monotonic=lambda: passed[0])
    passed[0] = 7.5
    wall[0] = 1e9
    assert time.mine() == [2500, 1_000_000] and len(time.mine()) == AgreedTime.COUNT
    other = [2400, 1_000_250]
    assert AgreedTime.seconds([min(pair) for pair in zip(time.mine(), other, strict=True)]) == 1002.4


def test_ranks_go_on_with_the_most_that_one_of_them_wrote_in_the_latest_day() -> None:
    def rank(day: int, written: int):
        rank, _ = ranked(bytes_per_day=100)
        rank.store.written_before = (day, written)
        return rank.store

    stores = [rank(9, 80), rank(10, 30), rank(10, 50), rank(0, 0)]
    said: list[list[int]] = []
    for store in stores:  # the first pass hears what everybody says
        agree_on_written(store, SimpleNamespace(minimum=lambda values: said.append(values) or values))
    latest = min(values[0] for values in said[::2])
    for store in stores:
        answers = iter([latest, -50])
        agree_on_written(store, SimpleNamespace(minimum=lambda values, answers=answers: [next(answers)]))
        assert store.admission.budget.state() == (10, 50)
        store.close()
