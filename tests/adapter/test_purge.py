"""Purging a server: every tier forgets, what others have stays, what is in use is counted, the ranks do the same."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from sglang_histate.adapter import purge
from sglang_histate.adapter.hooks import add_internal_state
from sglang_histate.store import NO_NAMESPACE, namespace_of

from .conftest import GPU
from .engine import tokens
from .stores import fake_disk, wait_threads
from .test_kv_ssd import Bench, all_nodes
from .test_restart import restarted
from .test_tenants import PROMPT, crowd, stored

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

ONE, TWO = {"cache_salt": "one"}, {"cache_salt": "two"}
OF_ONE = namespace_of(None, "one")
OTHER = tokens((6, 512))


@pytest.fixture
def bench():
    made = Bench(host_pages=96)
    yield made
    made.tier.close()


def in_all_tiers(bench: Bench) -> None:
    """Both tenants have something on the device, on the host and on the SSD."""
    for tenant in (ONE, TWO):
        crowd(bench, tenant)
    for tenant in (ONE, TWO):
        bench.visit(OTHER, **tenant)
        bench.off_device()
        bench.visit(PROMPT, **tenant)


def run(bench: Bench, namespace: bytes | None) -> dict:
    found = purge.purge(bench.engine.cache, namespace)
    wait_threads(bench.store)
    bench.tier.tick()
    bench.drain()
    bench.engine.check()
    deadline = time.monotonic() + 20
    while bench.store.stats().purges.done < bench.store.stats().purges.asked:  # the writer thread erases
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_one_tenant_goes_from_every_tier_and_the_other_stays(bench) -> None:
    in_all_tiers(bench)
    found = run(bench, OF_ONE)
    assert found["ssd_entries"] > 10 and found["nodes"] >= 2 and found["in_use"] == 0
    assert {namespace for namespace, _ in stored(bench)} == {namespace_of(None, "two")}
    assert all(node.key.cache_salt == "two" for node in all_nodes(bench))
    for ids in (PROMPT, OTHER, tokens((103, 512))):
        assert bench.ask(ids, **ONE) == 0
        assert bench.ask(ids, **TWO) == len(ids)
    bench.engine.check()
    bench.check_idle()


def test_it_does_not_come_back_with_a_restart(bench) -> None:
    in_all_tiers(bench)
    run(bench, OF_ONE)
    assert OF_ONE not in bytes(fake_disk(bench.store).content)
    again = restarted(bench, host_pages=96)
    try:
        assert {namespace for namespace, _ in stored(again)} == {namespace_of(None, "two")}
        assert again.ask(tokens((103, 512)), **ONE) == 0
        assert again.ask(tokens((103, 512)), **TWO) == 512
    finally:
        again.tier.close()


def test_everything(bench) -> None:
    in_all_tiers(bench)
    bench.visit(PROMPT)
    assert run(bench, None)["in_use"] == 0
    assert all_nodes(bench) == [] and not stored(bench)
    assert bench.engine.arena.free_pages == bench.engine.arena.total_pages
    bench.visit(PROMPT, **ONE)  # and goes on as if new
    assert bench.ask(PROMPT, **ONE) == len(PROMPT)
    bench.check_idle()


def test_requests_without_a_tenant_are_one_too(bench) -> None:
    bench.visit(PROMPT)
    bench.visit(PROMPT, **ONE)
    run(bench, NO_NAMESPACE)
    assert bench.ask(PROMPT) == 0 and bench.ask(PROMPT, **ONE) == len(PROMPT)


def test_what_a_request_uses_stays_and_is_counted(bench) -> None:
    in_all_tiers(bench)
    bench.visit(PROMPT, **ONE)
    node_id = bench.match(PROMPT, **ONE).best_match_node
    lock = bench.engine.cache.inc_lock_ref(node_id).to_dec_params()
    found = run(bench, OF_ONE)
    assert found["in_use"] == 1 and {namespace for namespace, _ in stored(bench)} == {
        namespace_of(None, "two")
    }
    bench.engine.cache.dec_lock_ref(node_id, lock)
    assert run(bench, OF_ONE) == {"ssd_entries": 0, "nodes": 1, "in_use": 0, "pending": True, "failed": 0}
    assert bench.ask(PROMPT, **ONE) == 0


def test_copies_on_their_way_to_the_ssd_do_not_survive_a_second_look(bench) -> None:
    crowd(bench, ONE)
    bench.visit(OTHER, **ONE)
    bench.off_device()
    node = next(node for node in all_nodes(bench) if node.key.token_ids[:64] == OTHER[:64])
    assert bench.tier.kv_spill.copy([node.id]) > 0 and len(bench.tier.kv_spill) > 0
    first = purge.purge(bench.engine.cache, OF_ONE)
    assert first["in_use"] > 0
    bench.settle()
    assert run(bench, OF_ONE)["in_use"] == 0
    assert not stored(bench) and all_nodes(bench) == []


def test_what_the_http_process_sends(bench) -> None:
    everything = purge.task_of({"all": True})
    assert purge.task_of({"cache_salt": "one"}) == purge.task_of({"namespace": OF_ONE.hex()})
    assert purge.task_of({"cache_salt": "one", "extra_key": None}) != everything
    for body in (None, [], {}, {"all": False}, {"all": True, "cache_salt": "x"}, {"namespace": "zz"},
                 {"namespace": "00"}, {"namespace": 7}, {"cache_salt": 7}, {"salt": "x"}):  # fmt: skip
        with pytest.raises(ValueError, match="send"):
            purge.task_of(body)


def test_the_way_through_the_scheduler(bench) -> None:
    in_all_tiers(bench)
    scheduler = SimpleNamespace(tree_cache=bench.engine.cache)
    asked: list[str] = []

    async def ask(rid: str) -> list[dict]:
        asked.append(rid)
        state: dict = {}
        add_internal_state(scheduler, state, SimpleNamespace(rid=rid))
        await asyncio.sleep(0.05)
        return [state["histate"]]

    task = purge.task_of({"cache_salt": "one"})
    found = asyncio.run(purge.run(ask, task))
    assert found["enabled"] and found["erased"] and found["in_use"] == 0 and found["nodes"] >= 2
    assert asked[0] == task and set(asked[1:]) == {purge.PENDING}
    assert purge.answer(object(), task) == {"enabled": False}
    assert (
        purge.answer(bench.engine.cache, None) is None
        and purge.answer(bench.engine.cache, "a request") is None
    )


def test_a_disk_that_fails_is_said(bench) -> None:
    in_all_tiers(bench)

    async def ask(rid: str) -> list[dict]:
        fake_disk(bench.store).write_faults.append("eio")
        found = purge.answer(bench.engine.cache, rid)
        wait_threads(bench.store)
        await asyncio.sleep(0.05)
        return [found]

    assert asyncio.run(purge.run(ask, purge.task_of({"all": True})))["erased"] is False
