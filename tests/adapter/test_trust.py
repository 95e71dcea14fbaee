"""A state that is not what its tokens give: the store goes out of use, on all ranks, in memory and for the next run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_histate.adapter.hooks import weights_change
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.trust import Trust
from sglang_histate.store import PutResult
from sglang_histate.store.fault_plan import FaultPlan
from sglang_histate.store.faults import FaultyDisk
from sglang_histate.store.quarantine import Quarantine, read_quarantine
from tests.store.fakes import FakeDisk

from .conftest import GPU
from .engine import PAGE, request, tokens
from .idle_scheduler import POSITION, A, Scheduler, restored, restored_already, start
from .stores import put
from .test_tier import Agreement, Alone, Rank, together

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


@pytest.fixture
def rank():
    made = Rank(Alone(), verify_rate=1.0)
    yield made
    made.store.close()


@pytest.fixture
def scheduler(rank):
    return Scheduler(rank)


@pytest.mark.parametrize("value", [3.2, -3.0, 0.0, float("nan")])
def test_a_difference_ends_all_use_of_the_store(rank, scheduler, value, caplog) -> None:
    restored(rank)
    put(rank.store, rank.engine.layout, b"o" * 32, 64, 1.0)
    rank.drain()
    start(scheduler)
    scheduler.compute(value)
    scheduler.settle()
    assert rank.counters.verified == rank.counters.mismatches == 1
    found = rank.tier.verification.as_json()
    assert (
        found["quarantined"] and "layer 0" in found["quarantine_reason"] and found["quarantined_since"] > "20"
    )
    assert caplog.text.count("HISTATE ALARM") == 1
    assert not list(rank.store.entries()), "records of any prompt are out of use"
    record = rank.store.acquire_record()
    assert rank.store.put(b"n" * 32, 64, record) is PutResult.QUARANTINED
    assert rank.tier.verification.trust.tree_doubted


def test_nothing_in_memory_is_used_until_the_flush(rank, scheduler) -> None:
    rank.engine.insert(A)
    rank.engine.settle()
    assert rank.engine.match(request(A)).best_match_node != rank.engine.cache.tree_core.root_node.id
    rank.tier.verification.trust.lose("a test")
    other = request(A)
    other.init_next_round_input(rank.engine.cache, cow_mamba=False)
    assert other.prefix_len == 0 and rank.engine.cache.request_ready(other)
    rank.prefill(other, 0, len(A))
    assert other.skip_radix_cache_insert, "its KV must not be exchanged for what lies in the tree"
    rank.drain()
    scheduler.busy = True
    scheduler.idle()
    assert scheduler.flushes == 0
    scheduler.busy = False
    scheduler.idle()
    scheduler.idle()
    assert scheduler.flushes == 1 and not rank.tier.verification.trust.tree_doubted
    rank.engine.insert(A)
    assert rank.engine.match(request(A)).best_match_node != rank.engine.cache.tree_core.root_node.id
    again = request(tokens((8, 300)))
    rank.prefill(again, 0, 300)
    assert not again.skip_radix_cache_insert
    rank.drain()
    assert not list(rank.store.entries())


def test_another_rank_found_it(rank, scheduler, caplog) -> None:
    restored(rank)
    start(scheduler)
    rank.tier.verification._agreement = SimpleNamespace(minimum=lambda values: [min(-1, v) for v in values])
    scheduler.compute(3.0)
    scheduler.settle()
    assert rank.counters.mismatches == 1 and "on another rank" in caplog.text


# The note


def wait_note(folder: Path) -> Quarantine:
    for thread in threading.enumerate():
        if thread.name == "histate-note":
            thread.join(10)
    found = read_quarantine(folder / "quarantined.json")
    assert found is not None
    return found


def test_the_next_run_knows(rank, tmp_path, caplog) -> None:
    trust = Trust(rank.store, [tmp_path], Alone())
    assert not trust.as_json()["quarantined"]
    trust.lose("the state is wrong")
    trust.lose("and once more")
    assert wait_note(tmp_path).why == "the state is wrong"
    assert caplog.text.count("HISTATE ALARM") == 1 and str(tmp_path) in caplog.text
    later = Trust(rank.store, [tmp_path], Alone())
    assert later.as_json() == trust.as_json() and later.as_json()["quarantine_reason"] == "the state is wrong"
    assert not later.tree_doubted, "nothing of this run came from it"


def test_one_rank_with_a_note_is_enough(rank, tmp_path) -> None:
    trust = Trust(rank.store, [tmp_path], SimpleNamespace(minimum=lambda values: [-1 for _ in values]))
    assert trust.as_json()["quarantined"] and "another rank" in wait_note(tmp_path).why


def test_every_root_gets_the_note_and_one_is_enough(rank, tmp_path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    Trust(rank.store, roots, Alone()).lose("a test")
    assert [wait_note(root).why for root in roots] == ["a test"] * 2
    (roots[0] / "quarantined.json").unlink()
    assert Trust(rank.store, roots, Alone()).as_json()["quarantine_reason"] == "a test"
    assert Trust(rank.store, roots[1:], Alone()).as_json()["quarantined"]


def test_what_was_recovered_before_the_note_was_seen_goes(rank, tmp_path) -> None:
    """The tree hears of each record that the store found; it must hear that none counts."""
    key = restored(rank)
    rank.engine.insert(A[:POSITION])
    rank.engine.settle()
    (tmp_path / "quarantined.json").write_text("damaged")
    assert Trust(rank.store, [tmp_path], Alone()).as_json()["quarantined"]
    rank.drain()
    rank.tier.tick()
    assert rank.store.lookup(key) is None and rank.engine.cache.request_ready(request(A))
    rank.check_idle()


# Ranks


@pytest.mark.parametrize("wrong_rank", [None, 0, 1])
def test_two_ranks_check_the_same_and_come_to_the_same(wrong_rank) -> None:
    agreement = Agreement(2)
    ranks = [
        Rank(
            agreement,
            FaultyDisk(FakeDisk(), FaultPlan(), seed=f"tp{number}", delay_s=delay_s),
            number=number,
            verify_rate=0.5,
        )
        for number, delay_s in enumerate((0.0002, 0.006))
    ]
    schedulers = [Scheduler(rank) for rank in ranks]
    schedulers[1].now_s = 5000.25  # clocks need not agree
    sampled = 0
    for number in range(8):
        ids = tokens((30 + number, 256))
        for rank in ranks:
            put(rank.store, rank.engine.layout, PageKeys(PAGE, None, None).at(ids, 64), 64, 3.0)
            restored_already(rank, ids, 64)
        pending = {rank.tier.verification.as_json()["pending"] for rank in ranks}
        assert len(pending) == 1
        (sampled,) = pending
    assert 0 < sampled < 8
    for _ in range(400):
        together([rank.tier.tick for rank in ranks])
        if not any(rank.store.outstanding for rank in ranks):
            break
        time.sleep(0.001)
    for _ in range(4):
        together([scheduler.idle for scheduler in schedulers])
    assert len({scheduler.waiting[0].rid for scheduler in schedulers}) == 1
    for number, scheduler in enumerate(schedulers):
        scheduler.compute(-3.0 if number == wrong_rank else 3.0)
    for _ in range(400):
        together([rank.tier.tick for rank in ranks])
        if all(rank.counters.verified for rank in ranks):
            break
        time.sleep(0.001)
    found = [rank.tier.verification.as_json()["quarantined"] for rank in ranks]
    assert found == [wrong_rank is not None] * 2
    assert ranks[0].store.logical_state() == ranks[1].store.logical_state()
    for rank in ranks:
        assert rank.counters.verified == 1 and rank.counters.mismatches == (wrong_rank is not None)
        rank.store.close()


def test_other_weights_end_the_use_of_the_store_and_leave_no_note(rank, caplog) -> None:
    """What is stored from now on would be found under the old weights' name by the next run."""
    put(rank.store, rank.engine.layout, b"o" * 32, 64, 1.0)
    rank.drain()
    weights_change(SimpleNamespace(tree_cache=rank.engine.cache))
    weights_change(SimpleNamespace(tree_cache=rank.engine.cache))
    assert caplog.text.count("weights are changed") == 1
    assert not list(rank.store.entries())
    record = rank.store.acquire_record()
    assert rank.store.put(b"n" * 32, 64, record) is PutResult.QUARANTINED
    found = rank.tier.verification.as_json()
    assert found["weights_changed"] and not found["quarantined"]
    assert not rank.tier.verification.trust.tree_doubted, "SGLang itself empties the tree, if it is asked to"


def test_without_histate_new_weights_are_nobodys_business() -> None:
    weights_change(None)
    weights_change(SimpleNamespace(tree_cache=object()))
