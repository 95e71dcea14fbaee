"""Checkpoints inside prompts on the host: chosen by price, attached in the tree, ranked, restored, and lost in the open."""

from __future__ import annotations

import json
import random
import time
from array import array

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from eval.journal import replay
from sglang_histate.adapter import host_history
from sglang_histate.adapter.counters import Drop, Why
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.purge import purge
from sglang_histate.adapter.saving import Saving
from sglang_histate.config import CheckpointDtype
from sglang_histate.policy.history_tier import CHOICES, TierReason
from sglang_histate.policy.interval import IntervalPolicy, parse_interval
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import LEAST_WRITE_TOKENS, MOST_PRICE, price_of_a_hit
from sglang_histate.pool import Kind
from sglang_histate.store import PutResult, WriteLimits, namespace_of
from tests.store.fakes import FakeDisk

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import fake_disk, open_store, wait_threads
from .test_eviction import resumes_at
from .test_kv_ssd import Bench
from .test_restart import restarted
from .test_tier import Agreement, Alone, Rank, run_ticks, same, together

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA
CHEAPER, REFUSED, END = TierReason.CHEAPER, TierReason.REFUSED, TierReason.PROMPT_END
READ_ONLY = WriteLimits(bytes_per_s=0)
LONG = 1000  # 256, 512, 768 and, for the prompt's end, 960


def ranked(**changes) -> Rank:
    return Rank(Alone(), **(dict(buffers=24, slabs=64, cheapest=True) | changes))


def fill(rank: Rank, capture) -> None:
    """Let the forward pass leave states whose numbers are all their position."""
    layout = rank.engine.layout
    for row in () if capture is None else capture.rows:
        for views in layout.record_views(row.record.payload):
            exact = views.conv.new_full((1, *layout.temporal_shape), float(row.position))
            for part, encoded in zip(views.temporal, layout.codec.encode(exact), strict=True):
                part.copy_(encoded[0])
            views.conv.fill_(row.position)


def publish(rank: Rank, req) -> None:
    """The request's KV is in the tree, up to its last whole page."""
    ids = req.full_untruncated_fill_ids
    end = len(ids) // PAGE * PAGE
    rank.engine.insert(ids[:end], **tenant(req))
    rank.engine.settle()
    req.last_node, req.kv.cache_protected_len = rank.engine.match(req).best_match_node, end
    rank.tier.published(req)


def tenant(req) -> dict[str, str]:
    return {} if req.cache_salt is None else {"cache_salt": req.cache_salt}


def serve(rank: Rank, ids: array, start: int = 0, **changes):
    """One request over `ids`, computed from `start` on."""
    req = request(ids, **changes)
    fill(rank, rank.prefill(req, start, len(ids)))
    publish(rank, req)
    rank.drain()
    return req


def placed(rank: Rank) -> dict:
    return {choice: count for choice, count in rank.counters.historical.items() if count}


def on_host(rank: Rank) -> list[int]:
    """Depths of the host states."""
    tree = rank.engine.ranking.tree
    return sorted(
        tree.start(node.id) + len(node.key)
        for node in rank.engine.nodes()
        if node.component_data[MAMBA].host_value is not None
    )


def on_ssd(rank: Rank) -> list[int]:
    return sorted(entry.at_token for entry in rank.store.entries() if not entry.page_keys)


def off_device(rank: Rank) -> None:
    rank.engine.evict_states(100)
    rank.engine.evict_kv(1 << 20)
    rank.engine.settle()


def dear(rank: Rank, tier: Tier, worth: float = 1e6) -> None:
    """The tier has given up what was worth so many tokens per checkpoint."""
    for _ in range(64):
        rank.engine.ranking.scarcity.requested(1)
        rank.engine.ranking.scarcity.evicted(tier, worth, rank.engine.layout.image_bytes, 0)


def end(rank: Rank) -> None:
    rank.drain()
    rank.check_idle()
    rank.store.close()


@pytest.mark.parametrize("encoding", [CheckpointDtype.NATIVE, CheckpointDtype.BF16])
def test_where_the_host_has_room_interior_ones_go_there_and_are_restored(encoding) -> None:
    rank = ranked(encoding=encoding)
    ids = tokens((1, LONG))
    serve(rank, ids)
    assert placed(rank) == {(Tier.HOST, CHEAPER): 3, (Tier.SSD, END): 1}
    assert on_host(rank) == [256, 512, 768] and on_ssd(rank) == [960]
    assert rank.counters.captured == rank.counters.planned == 4
    off_device(rank)
    rewrite = ids[:700] + tokens((7, 200))
    assert resumes_at(rank.engine, rewrite) == 512, "by SGLang's own match: the load-back does the rest"
    node = rank.engine.cache.tree_core.node_by_id(rank.engine.match(request(rewrite)).best_match_node)
    (slot,) = node.component_data[MAMBA].host_value.tolist()
    for views in rank.engine.host_state(slot):
        assert (views.temporal == 512.0).all() and (views.conv == 512.0).all()
    end(rank)


def test_without_the_flag_all_go_to_the_ssd() -> None:
    rank = ranked(cheapest=False)
    serve(rank, tokens((1, LONG)))
    assert placed(rank) == {(Tier.SSD, TierReason.FLAG): 4}
    assert on_host(rank) == [] and on_ssd(rank) == [256, 512, 768, 960]
    end(rank)


@pytest.mark.parametrize("encoding", [CheckpointDtype.NATIVE, CheckpointDtype.BF16])
def test_what_may_not_be_written_goes_to_the_host_ends_too(encoding) -> None:
    rank = ranked(limits=READ_ONLY, encoding=encoding)
    ids = tokens((1, LONG))
    serve(rank, ids)
    assert placed(rank) == {(Tier.HOST, REFUSED): 4}
    assert on_host(rank) == [256, 512, 768, 960] and on_ssd(rank) == [] and rank.published == []
    assert rank.store.stats().puts == {PutResult.WRITE_BUDGET: 4} and not any(rank.counters.dropped.values())
    off_device(rank)
    assert resumes_at(rank.engine, ids[:600]) == 512 and resumes_at(rank.engine, ids) == 960
    end(rank)


def test_a_disk_that_fails_leaves_the_host() -> None:
    rank = ranked()
    fake_disk(rank.store).write_faults.extend(["eio"] * 100)
    seed = 1
    while rank.store._roots.writable():
        serve(rank, tokens((seed, 130)))  # only an end each
        seed += 1
        assert seed < 40, "the breaker never opens"
    before = placed(rank).get((Tier.HOST, REFUSED), 0)
    serve(rank, tokens((100, LONG)))
    assert placed(rank)[Tier.HOST, REFUSED] == before + 1, "its end"
    assert placed(rank)[Tier.HOST, CHEAPER] == 3
    end(rank)


def test_a_full_ssd_whose_victims_were_worth_more_than_the_host_s() -> None:
    rank = ranked(slabs=4, kv_tokens=8192)
    for seed in range(1, 6):
        serve(rank, tokens((seed, 130)))
    assert rank.store.fill == 1.0
    filled = rank.engine.arena.allocate(rank.engine.arena.free_pages * 9 // 10, Kind.KV)
    dear(rank, Tier.HOST, 100.0)
    dear(rank, Tier.SSD, 1e5)
    host, ssd = rank.tier._planner._history.prices()
    assert 0 < host < ssd < MOST_PRICE
    before = on_ssd(rank)
    serve(rank, tokens((50, LONG)))
    assert placed(rank)[Tier.HOST, CHEAPER] == 3
    assert sorted(on_ssd(rank))[-1] == 960 and len(on_ssd(rank)) == len(before), "its end made room"
    rank.engine.arena.free(filled, Kind.KV)
    end(rank)


def test_a_host_whose_victims_were_worth_more_leaves_them_to_the_ssd() -> None:
    rank = ranked()
    filled = rank.engine.arena.allocate(rank.engine.arena.free_pages * 9 // 10, Kind.KV)
    dear(rank, Tier.HOST)
    serve(rank, tokens((1, LONG)))
    assert placed(rank) == {(Tier.SSD, CHEAPER): 3, (Tier.SSD, END): 1}
    assert on_ssd(rank) == [256, 512, 768, 960]
    rank.engine.arena.free(filled, Kind.KV)
    end(rank)


def test_what_is_worth_neither_is_not_captured() -> None:
    rank = ranked(limits=READ_ONLY)
    filled = rank.engine.arena.allocate(rank.engine.arena.free_pages * 9 // 10, Kind.KV)
    dear(rank, Tier.HOST)
    ids = tokens((1, LONG))
    assert rank.prefill(request(ids), 0, LONG) is None
    assert rank.counters.dropped[Drop.HOST_PRICE] == 4 and rank.counters.dropped[Drop.REFUSED] == 0
    key = PageKeys(PAGE, None, None).at(ids, 512)
    assert rank.engine.ranking.absences.why(key) is Why.WRITE_LIMITS
    rank.engine.arena.free(filled, Kind.KV)
    end(rank)


def test_the_plan_asks_for_what_the_cheaper_tier_costs(monkeypatch) -> None:
    rank = ranked()
    history, ranking = rank.tier._planner._history, rank.engine.ranking
    assert history.prices() == (0.0, ranking.checkpoint_price())
    assert history.price() == LEAST_WRITE_TOKENS, (
        "a place that is free is no reason to fill it with what saves nothing"
    )
    filled = rank.engine.arena.allocate(rank.engine.arena.free_pages, Kind.KV)
    dear(rank, Tier.HOST, 1e5)
    rank.store.admission.budget.__init__(1000, None, 1000)
    rank.store.admission.budget.bucket.level *= 0.1
    host, ssd = history.prices()
    assert LEAST_WRITE_TOKENS < ssd < host and history.price() == ssd == ranking.checkpoint_price()
    assert rank.tier.prices() == {
        "capture_price_tokens": ssd,
        "history_price_tokens": {"host": host, "ssd": ssd},
    }
    rank.store.admission.budget.__init__(0, None, 1)
    assert history.prices() == (host, MOST_PRICE) and history.price() == host
    asked: list[float] = []
    monkeypatch.setattr(IntervalPolicy, "choose", lambda self, n, cost, pressure: asked.append(cost) or 0)
    rank.tier._planner._interval = parse_interval("scarce")
    rank.prefill(request(tokens((1, 4000))), 0, 1024)
    assert asked == [price_of_a_hit(host, ranking.hits_inside(0, 4000))]
    rank.engine.arena.free(filled, Kind.KV)
    rank.store.close()


def test_an_answer_that_fills_no_page_is_not_copied_again() -> None:
    rank = ranked(limits=READ_ONLY)
    req = serve(rank, tokens((1, LONG)))
    copies = rank.counters.output_ends
    assert on_host(rank)[-1] == 960
    rank.tier.output_ends.take(req)
    assert len(rank.tier.output_ends) == 0 and rank.counters.output_ends == copies
    end(rank)


def test_without_kv_on_the_host_it_goes_to_the_ssd_at_its_worth() -> None:
    rank = ranked(host_pages=4)  # less than the prompt's KV takes, so it is not backed up
    req = request(tokens((1, LONG)))
    capture = rank.prefill(req, 0, LONG)
    worth = [row.record.value for row in capture.rows if row.tier is Tier.HOST]
    fill(rank, capture)
    publish(rank, req)
    seen = []
    real = rank.store.admission.claim
    rank.store.admission.claim = lambda name, size, value: seen.append(value) or real(name, size, value)
    rank.drain()
    assert placed(rank) == {(Tier.SSD, TierReason.NO_HOST_PLACE): 3, (Tier.SSD, END): 1}
    assert on_ssd(rank) == [256, 512, 768, 960]
    assert seen == worth and len(worth) == 3 and all(worth)
    end(rank)


def test_a_host_without_room_gives_its_records_back() -> None:
    rank = ranked(limits=READ_ONLY)
    rank.engine.slots.alloc = lambda: None
    rank.tier.history._copies._slots = rank.engine.slots
    ids = tokens((1, LONG))
    serve(rank, ids)
    assert placed(rank) == {} and rank.counters.dropped[Drop.NO_HOST_PLACE] == 4
    key = PageKeys(PAGE, None, None).at(ids, 512)
    assert rank.engine.ranking.absences.why(key) is Why.NO_HOST_ROOM
    end(rank)


def test_it_waits_until_its_kv_is_in_the_tree() -> None:
    rank = ranked()
    req = request(tokens((1, LONG)))
    fill(rank, rank.prefill(req, 0, LONG))
    for _ in range(3):
        rank.tier.tick()
    assert len(rank.tier.history) == 3 and on_host(rank) == []
    publish(rank, req)
    rank.tier.tick()
    assert len(rank.tier.history) == 0 and rank.tier.history.copying == 3
    rank.drain()
    assert on_host(rank) == [256, 512, 768]
    end(rank)


def test_kv_that_never_comes_leaves_it_to_the_ssd() -> None:
    rank = ranked()
    fill(rank, rank.prefill(request(tokens((1, LONG))), 0, LONG))
    for _ in range(host_history.WAIT_STEPS - 1):
        rank.tier.tick()
    assert len(rank.tier.history) == 3
    rank.drain()
    assert placed(rank) == {(Tier.SSD, TierReason.NO_HOST_PLACE): 3, (Tier.SSD, END): 1}
    end(rank)


def test_an_abort_drops_what_waits() -> None:
    rank = ranked()
    req = request(tokens((1, LONG)))
    fill(rank, rank.prefill(req, 0, LONG))
    rank.tier.tick()
    rank.tier.released(req)
    rank.drain()
    assert rank.counters.dropped[Drop.ABORTED] == 3 and on_host(rank) == []
    end(rank)


def test_a_purge_drops_what_waits_of_its_tenant_and_a_flush_all_of_it() -> None:
    rank = ranked()
    for seed, salt in ((1, "a"), (2, "b")):
        fill(rank, rank.prefill(request(tokens((seed, LONG)), cache_salt=salt), 0, LONG))
        rank.tier.tick()
    assert len(rank.tier.history) == 6
    purge(rank.engine.cache, namespace_of(None, "a"))
    assert len(rank.tier.history) == 3 and rank.counters.dropped[Drop.CACHE_RESET] == 3
    wait_threads(rank.store)
    rank.engine.cache.reset()
    assert len(rank.tier.history) == 0 and rank.counters.dropped[Drop.CACHE_RESET] == 6
    end(rank)


def test_a_flush_while_copies_are_under_way() -> None:
    rank = ranked()
    req = request(tokens((1, LONG)))
    fill(rank, rank.prefill(req, 0, LONG))
    publish(rank, req)
    rank.tier.tick()
    assert rank.tier.history.copying == 3
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    assert rank.tier.history.copying == 0
    end(rank)
    assert on_host(rank) == [] and not any(
        rank.counters.historical[Tier.HOST, why] for why in (CHEAPER, REFUSED)
    )


def test_a_state_that_is_not_finite_is_not_attached() -> None:
    rank = ranked()
    req = request(tokens((1, LONG)))
    capture = rank.prefill(req, 0, LONG)
    fill(rank, capture)
    rank.engine.layout.views(capture.rows[1].record.payload)[0].temporal.fill_(float("nan"))
    publish(rank, req)
    rank.drain()
    assert on_host(rank) == [256, 768] and rank.counters.dropped[Drop.NOT_COPIED] == 1
    end(rank)


def test_two_requests_with_the_same_text_leave_one() -> None:
    rank = ranked()
    reqs = [request(tokens((1, LONG))) for _ in range(2)]
    for req in reqs:
        fill(rank, rank.prefill(req, 0, LONG))
    for req in reqs:
        publish(rank, req)
    rank.drain()
    assert on_host(rank) == [256, 512, 768] and placed(rank)[Tier.HOST, CHEAPER] == 3
    assert rank.counters.already_stored == 3
    end(rank)


def test_what_the_host_has_is_not_captured_again() -> None:
    rank = ranked()
    ids = tokens((1, LONG))
    serve(rank, ids)
    assert rank.prefill(request(ids), 0, LONG) is None, (
        "the device had no room to load it: all is computed again"
    )
    assert rank.counters.already_stored == 4
    end(rank)


def loaded(rank: Rank, position: int):
    """The host's state at `position` has been loaded: the device has it too. Return its node."""
    tree = rank.engine.ranking.tree
    (node,) = [
        node
        for node in rank.engine.nodes()
        if tree.start(node.id) + len(node.key) == position
        and node.component_data[MAMBA].host_value is not None
    ]
    rank.engine.cache.tree_core.host_lru_lists[MAMBA].remove_node(node)
    rank.engine.cache.tree_core.set_component_device_value(node.id, MAMBA, rank.engine.states.alloc(1))
    rank.engine.slots.drop_loaded(node.id)
    return node


def test_a_load_does_not_take_it_from_the_host_unless_the_ssd_has_it() -> None:
    rank = ranked()
    ids = tokens((1, LONG))
    serve(rank, ids)
    node = loaded(rank, 512)
    assert node.component_data[MAMBA].host_value is not None
    rank.engine.check()
    rank.engine.evict_states(100)
    assert node.component_data[MAMBA].value is None and on_host(rank) == [256, 512, 768]
    rank.engine.check()
    rank.engine.on_ssd(node.id)
    loaded(rank, 512)
    assert on_host(rank) == [256, 768], "it only passed through"
    end(rank)


def test_eviction_ranks_it_and_says_why_it_is_gone() -> None:
    rank = ranked()
    ids = tokens((1, LONG))
    serve(rank, ids)
    off_device(rank)
    keys = PageKeys(PAGE, None, None)
    tip = rank.engine.match(request(ids)).last_visited_node_id
    assert len(on_host(rank)) == 3
    lock = rank.engine.cache.inc_host_lock_ref(tip).to_dec_params()  # or the session's tail would go first
    rank.engine.cache.evict_host(1, MAMBA)
    rank.engine.cache.dec_host_lock_ref(tip, lock)
    assert rank.engine.ranking.evictions["host_intermediate"] == 1 and len(on_host(rank)) == 2
    (lost,) = {256, 512, 768} - set(on_host(rank))
    assert rank.engine.ranking.absences.why(keys.at(ids, lost)) is Why.EVICTED
    left = on_host(rank)
    assert resumes_at(rank.engine, ids[:800]) == left[-1]
    assert rank.engine.host_states.held == 2
    rank.engine.cache.evict_host(1 << 20)
    assert on_host(rank) == [] and rank.engine.host_states.held == 0
    end(rank)


def test_a_reused_one_outlives_one_that_nobody_came_back_to() -> None:
    """Not by kind: the ranking weighs them with everything else on the host."""
    rank = ranked()
    first, second = tokens((1, 600)), tokens((2, 600))
    serve(rank, first)
    serve(rank, second)
    core, ranking = rank.engine.cache.tree_core, rank.engine.ranking
    off_device(rank)
    for _ in range(30):
        ranking.admitted(core.node_by_id(rank.engine.match(request(first[:300])).best_match_node))
    rank.engine.cache.evict_host(1, MAMBA)
    assert resumes_at(rank.engine, first[:300]) == 256
    end(rank)


def test_the_log_gives_the_same_tiers_again() -> None:
    events: list = []
    journal = Journal(lambda event: events.append(json.loads(json.dumps(event))))
    rank = ranked(journal=journal)
    serve(rank, tokens((1, LONG)))
    rank.store.admission.budget.__init__(0, None, 1)
    serve(rank, tokens((2, LONG)))
    outcome = replay(events)
    assert outcome.different == [] and outcome.tiers == 4 + 2 * 4
    chosen = [event for event in events if event[0] == "tier"]
    assert {event[-1] for event in chosen} == {int(Tier.HOST), int(Tier.SSD)}
    chosen[0][-1] = int(Tier.SSD)
    assert "tier" in replay(events).different[0]
    end(rank)


def test_every_choice_is_counted_from_the_start() -> None:
    rank = ranked()
    assert rank.counters.as_json()["historical_checkpoints_total"] == {
        f"{tier.name.lower()} {reason.value}": 0 for tier, reason in CHOICES
    }
    rank.store.close()


@pytest.mark.parametrize(("limits", "reason"), [(None, CHEAPER), (READ_ONLY, REFUSED)])
def test_two_ranks_choose_alike(limits, reason) -> None:
    agreement = Agreement(2)
    ranks = [
        Rank(
            agreement,
            FakeDisk(),
            number=number,
            slabs=12,
            buffers=12,
            cheapest=True,
            host_pages=80,
            limits=limits,
        )
        for number in range(2)
    ]
    draw = random.Random(5)
    bases = [tokens((base, 1024)) for base in range(1, 6)]
    late: list[list] = []
    for step in range(120):
        base, cut = draw.choice(bases), draw.randrange(100, 1025)
        ids = base[:cut] + tokens((draw.randrange(20, 400), 90))
        reqs = [request(ids) for _ in ranks]
        delays = [draw.randrange(4), draw.randrange(4)]
        captures = [r.prefill(req, 0, len(ids), d) for r, req, d in zip(ranks, reqs, delays, strict=True)]
        same([c and [(row.key, row.tier, row.reason) for row in c.rows] for c in captures])
        for r, capture in zip(ranks, captures, strict=True):
            fill(r, capture)
        late.append(reqs)
        if draw.random() < 0.7:
            for waiting in late:
                for r, req in zip(ranks, waiting, strict=True):
                    try:
                        publish(r, req)
                    except MemoryError:
                        off_device(r)
                        r.tier.released(req)
            late.clear()
        if draw.random() < 0.3:
            for r in ranks:
                off_device(r)
        if draw.random() < 0.2:
            for r in ranks:
                r.engine.cache.evict_host(PAGE * 6)
        run_ticks(ranks)
        time.sleep(0.001)
        same([r.store.logical_state() for r in ranks])
        same([r.engine.arena.free_pages for r in ranks])
        same([r.engine.ranking.evictions for r in ranks])
        same([r.counters.historical for r in ranks])
        if step % 6 == 0 and not any(r.tier.history.copying for r in ranks):
            same([on_host(r) for r in ranks])
            for r in ranks:
                r.engine.check()
    while not all(r.idle() for r in ranks):
        for r in ranks:
            wait_threads(r.store)
        together([r.tier.tick for r in ranks])
    found = ranks[0].counters.historical
    assert found[Tier.HOST, reason] > 5 and (found[Tier.SSD, END] > 5) == (limits is None), found
    for r in ranks:
        r.check_idle()
        r.store.close()


def kept(bench: Bench, ids: array) -> None:
    """A session over 512 tokens whose end is on the SSD and whose checkpoint after 256 only the host has."""
    bench.visit(ids)
    req = request(ids)
    fill(bench, bench.prefill(req, 0, len(ids)))
    publish(bench, req)
    bench.drain()
    assert 256 in on_host(bench) and bench.store.lookup(PageKeys(PAGE, None, None).at(ids, 256)) is None
    bench.off_device()


def test_kv_that_leaves_the_host_for_the_ssd_takes_its_end_along_and_not_what_only_the_host_has() -> None:
    bench = Bench(cheapest=True)
    ids = tokens((1, 512))
    kept(bench, ids)
    for seed in range(20, 40):
        bench.visit(tokens((seed, 512)))
        bench.off_device()
        bench.settle()
    assert bench.match(ids).full_kv_hit_length == 0, "all of its KV has left the host"
    assert bench.ask(ids[:300]) == 0, "nothing on the SSD restores that"
    assert bench.ask(ids) == 512
    bench.engine.check()
    bench.tier.close()


def test_a_graceful_exit_saves_it_too() -> None:
    bench = Bench(cheapest=True, host_pages=96)
    ids = tokens((1, 512))
    kept(bench, ids)
    Saving(bench.tier, bench.engine.slots.read_into, time.monotonic() + 20).run()
    bench.tier.close()
    again = restarted(bench)
    assert again.ask(ids[:300]) == 256
    again.tier.close()


def test_a_record_is_worth_what_it_says() -> None:
    rank = ranked()
    store = open_store(rank.engine.layout, slabs=8)
    seen = []
    real = store.admission.claim
    store.admission.claim = lambda name, size, value: seen.append(value) or real(name, size, value)
    record = store.acquire_record()
    record.value = 0.25
    store.put(b"k" * 32, 64, record)
    wait_threads(store)
    store.poll()
    again = store.acquire_record()
    assert seen == [0.25] and again.value is None, "a record that is used again is worth any price"
    store.release_record(again)
    store.close()
    rank.store.close()
