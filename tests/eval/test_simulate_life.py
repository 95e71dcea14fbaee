"""Single requests through engine and tiers, worked out by hand."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from eval.records import Record
from eval.simulate.budgets import Budgets, OverBudget, Space
from eval.simulate.costs import Costs
from eval.simulate.engine import Clock, Engine
from eval.simulate.histate import HiState
from eval.simulate.loop import ClosedLoop
from eval.simulate.marconi import FlopOrder, flop_aware
from eval.simulate.offload import Cascade
from eval.simulate.orders import MakeOrder, queue
from eval.simulate.placement import Adaptive, Ends
from eval.simulate.systems import SYSTEMS, Tuning
from eval.simulate.tiered import Tiered
from eval.workloads.sessions import Session, Turn
from sglang_histate.policy.interval import NO_INTERVAL, IntervalPolicy
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind

COSTS = Costs()
GIB = 1 << 30
PAGE = COSTS.page_bytes


def session(name: str, *turns: tuple[int, int, float], start: int = 0) -> Session:
    """Turns of (whole blocks, output tokens, pause); every prompt begins like the longest one."""
    return Session(
        name,
        64,
        tuple(
            Turn(blocks * 64 + 1, output, tuple(range(start, start + blocks)), 0.0, gap, 0.0)
            for blocks, output, gap in turns
        ),
    )


def run(
    name: str, sessions: list[Session], budgets: Budgets | None = None, live: int = 9, chunk: int = 8192
) -> list[Record]:
    clock = Clock()
    system = SYSTEMS[name].build(COSTS, budgets or Budgets(), clock.at, Tuning())
    return serve(system, clock, sessions, live, chunk)


def serve(system, clock: Clock, sessions: list[Session], live: int = 9, chunk: int = 8192) -> list[Record]:
    records: list[Record] = []
    Engine(system, clock, COSTS, ClosedLoop(sessions, live, 1e6), records.append, chunk).run()
    return records


def test_times_of_one_request_are_those_of_the_cost_model() -> None:
    (one,) = run("none", [session("s", (300, 5, 0.0))])
    tokens = 300 * 64 + 1
    chunks = [(8192, 0), (8192, 8192), (tokens - 16_384, 16_384)]
    first = sum(COSTS.prefill_s(new, before) for new, before in chunks)
    assert one.ttft_s == pytest.approx(first)
    decode = sum(COSTS.step_time_s(0.0, 1, tokens + done) for done in range(1, 5))
    assert one.end_s - one.first_token_s == pytest.approx(decode)


def test_two_prompts_share_a_chunk_first_come_first_served() -> None:
    first, second = run("none", [session("a", (100, 1, 0.0)), session("b", (100, 1, 0.0))])
    flop = COSTS.prefill_flop(6401, 0) + COSTS.prefill_flop(1728, 0)  # the rest of 8,192, in whole pages
    assert first.ttft_s == pytest.approx(COSTS.step_time_s(flop, 0, 0))
    assert second.ttft_s == pytest.approx(first.ttft_s + COSTS.prefill_s(6401 - 1728, 1728))


def test_decoding_goes_on_beside_a_prompt_that_comes_later() -> None:
    served = [session("a", (10, 400, 0.0)), session("b", (10, 1, 0.0), (2000, 1, 0.5), start=5000)]
    long, short, late = sorted(run("none", served), key=lambda one: (one.session, one.turn))
    assert long.first_token_s < late.first_token_s < long.end_s
    gaps = (long.end_s - long.first_token_s) / 399
    assert COSTS.step_s < gaps  # slower than alone
    assert short.ttft_s == long.ttft_s


def test_the_next_turn_restores_what_answer_and_prompt_left_and_says_from_where() -> None:
    served = [session("s", (100, 300, 0.0), (160, 1, 1.0))]
    first, second = run("vllm-cpu", served)
    assert first.hit == 0 and first.checkpoint_tier == ""
    end = (6401 + 299) // 64 * 64
    assert second.restored == {"device": end, "host": 0, "ssd": 0}
    assert (second.checkpoint_tier, second.kv_match, second.reusable) == ("device", end, end)


def evicted(name: str, budgets: Budgets, count: int = 4) -> Record:
    """One session returns after others have filled what they could."""
    others = [session(f"o{n}", (400, 1, 0.0), start=10_000 * n) for n in range(1, count + 1)]
    served = [session("s", (400, 1, 0.0), (410, 1, 500.0)), *others]
    return next(one for one in run(name, served, budgets, live=99) if one.key == ("s", "", 1))


def test_what_left_the_device_comes_from_the_host_and_takes_the_link() -> None:
    budgets = Budgets(2 * 400 * PAGE, 20 * GIB, 0)
    one = evicted("vllm-cpu", budgets)
    assert one.restored == {"device": 0, "host": 400 * 64, "ssd": 0} and one.checkpoint_tier == "host"
    load = (400 * PAGE + COSTS.state_bytes) / COSTS.pcie_bytes_s
    assert one.ttft_s == pytest.approx(max(load, COSTS.prefill_s(641, 400 * 64)))


def test_what_left_the_host_comes_from_the_disk_and_is_waited_for() -> None:
    budgets = Budgets(2 * 400 * PAGE, 900 * PAGE, 20 * GIB)
    one = evicted("vllm-disk", budgets)
    assert one.restored == {"device": 0, "host": 0, "ssd": 400 * 64} and one.checkpoint_tier == "ssd"
    size = 400 * PAGE + COSTS.state_bytes
    read = size / COSTS.ssd_read_bytes_s + COSTS.ssd_latency_s
    load = size / COSTS.pcie_bytes_s
    assert one.ttft_s == pytest.approx(read + max(load, COSTS.prefill_s(641, 400 * 64)))
    assert evicted("vllm-cpu", budgets).hit == 0


# A chunk is far less than an eighth of the host: what is cold is on the SSD before its room is needed.
SPILLING = Budgets(2 * 420 * PAGE, 4000 * PAGE + 20 * COSTS.state_bytes, 20 * GIB)


def test_histate_spills_cold_kv_and_reads_it_back() -> None:
    one = evicted("histate", SPILLING, 15)
    assert one.restored["ssd"] == 400 * 64 and one.checkpoint_tier == "ssd"


def test_requests_wait_until_the_device_has_room_for_all_they_need() -> None:
    room = 102 * PAGE + COSTS.state_bytes  # for one
    budgets = Budgets(room + COSTS.state_bytes, 0, 0)
    served = [session("a", (100, 50, 0.0)), session("b", (100, 50, 0.0), start=1000)]
    first, second = run("marconi", served, budgets)
    assert second.first_token_s > first.end_s


def test_an_internal_hit_falls_back_to_the_checkpoint_before() -> None:
    turns = (
        Turn(6401, 1, tuple(range(100)), 0, 0, 0),
        Turn(6401, 1, (*range(50), *range(200, 250)), 0, 1, 0),
    )
    served = [Session("s", 64, turns)]
    _, plain = run("vllm-cpu", served)
    assert (plain.hit, plain.kv_match, plain.recomputed_with_kv, plain.rewrite) == (0, 3200, 3200, True)
    again = Session("s", 64, (*turns, Turn(6401, 1, (*range(50), *range(300, 350)), 0, 1, 0)))
    assert run("vllm-cpu", [again])[2].hit == 0
    assert run("marconi", [again])[2].hit == 3200  # the second request has left a checkpoint where it parted


def test_histate_takes_interior_checkpoints_of_long_segments_to_the_ssd() -> None:
    turns = (
        Turn(64_001, 1, tuple(range(1000)), 0, 0, 0),
        Turn(64_001, 1, (*range(500), *range(2000, 2500)), 0, 1, 0),
    )
    served = [Session("s", 64, turns)]
    _, rewritten = run("histate", served, chunk=65_536)  # one chunk: its end helps nobody
    assert rewritten.hit == 16_384 and rewritten.checkpoint_tier == "ssd"
    assert rewritten.restored["device"] == rewritten.hit  # KV was never away
    assert run("histate-none", served, chunk=65_536)[1].hit == 0
    _, rewritten = run("histate-none", served)
    assert (rewritten.hit, rewritten.checkpoint_tier) == (24_576, "device")  # after the third chunk


@dataclasses.dataclass(frozen=True)
class Many(Ends):
    """A checkpoint after every page."""

    def positions(self, segment):
        return tuple(range(segment.start // 64 + 1, segment.end // 64 + 1))


def test_interior_captures_beyond_the_buffers_are_dropped_evenly_and_the_last_is_kept() -> None:
    clock = Clock()
    system = HiState(COSTS, Budgets(), clock.at, placement=Many(), order=queue(COSTS, Eviction.SCORE))
    serve(system, clock, [session("s", (100, 1, 0.0))])
    (found,) = [sorted(run.states) for run in system.contents.runs.values() if run.states]
    assert len(found) == 18 and found[-1] == 100  # of 20 buffers reads have two
    assert {after - before for before, after in pairwise(found)} <= {3, 5, 6}
    assert system.facts()["captures"] == {"stored": 18, "no_buffer": 82, "no_room": 0, "write_budget": 0}


def test_a_read_that_is_late_is_not_waited_for() -> None:
    slow = dataclasses.replace(COSTS, ssd_read_bytes_s=1e6)
    clock = Clock()
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), COSTS.state_tokens)
    system = HiState(slow, SPILLING, clock.at, placement=placement, order=queue(COSTS, Eviction.SCORE))
    others = [session(f"o{n}", (400, 1, 0.0), start=10_000 * n) for n in range(1, 16)]
    served = [session("s", (400, 1, 0.0), (410, 1, 500.0)), *others]
    one = next(one for one in serve(system, clock, served, live=99) if one.key == ("s", "", 1))
    assert one.hit == 0 and 5.0 < one.ttft_s < 7.0
    assert system.facts()["ssd_waits_given_up"] == 1


def test_who_joins_a_read_that_is_late_waits_no_longer_than_those_before() -> None:
    slow = dataclasses.replace(COSTS, ssd_read_bytes_s=1e6)
    clock = Clock()
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), COSTS.state_tokens)
    system = HiState(slow, SPILLING, clock.at, placement=placement, order=queue(COSTS, Eviction.SCORE))
    others = [session(f"o{n}", (400, 1, 0.0), start=10_000 * n) for n in range(1, 16)]
    first = session("s", (400, 1, 0.0), (410, 1, 500.0))
    joins = (Turn(65, 1, (77_777,), 0.0, 0.0, 0.0), dataclasses.replace(first.turns[1], gap_s=503.5))
    served = [Session("t", 64, joins), first, *others]
    served = [dataclasses.replace(one, shared_ids=True) for one in served]
    times = {one.key: one for one in serve(system, clock, served, live=99)}
    early, late = times["s", "", 1], times["t", "", 1]
    assert 2.5 < late.eligible_s - early.eligible_s < 3.5
    assert 5.0 < early.ttft_s < 7.0 and 1.5 < late.ttft_s < 4.0
    assert system.facts()["ssd_waits_given_up"] == 2


def test_an_answer_that_completes_no_page_leaves_its_state_on_the_host_too() -> None:
    def tiers(output: int) -> dict[int, int]:
        clock = Clock()
        order = queue(COSTS, Eviction.SCORE)
        placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), COSTS.state_tokens)
        system = HiState(COSTS, Budgets(), clock.at, placement=placement, order=order)
        serve(system, clock, [session("s", (100, output, 0.0))])
        held = [run for run in system.contents.runs.values() if run.states]
        return {run.start + page: state.tiers for run in held for page, state in run.states.items()}

    everywhere = 1 << Tier.DEVICE | 1 << Tier.HOST | 1 << Tier.SSD
    assert tiers(5) == {100: everywhere}
    assert tiers(200) == {100: everywhere ^ 1 << Tier.HOST, 103: everywhere}


def test_a_space_refuses_what_it_does_not_have() -> None:
    space = Space("host", 10)
    space.take(10)
    for size in (1, -11):
        with pytest.raises(OverBudget, match="host: "):
            space.take(size)
            space.take(-size)
        space.used = 10


def marconi(order: MakeOrder, *served: Session) -> tuple[Tiered, FlopOrder]:
    clock = Clock()
    system = Cascade(COSTS, Budgets(45 * GIB, 0, 0), clock.at, placement=Ends(branches=True), order=order)
    serve(system, clock, list(served), live=1)
    found = system.kv_orders[Tier.DEVICE]
    assert isinstance(found, FlopOrder)
    return system, found


def test_marconi_weighs_what_a_hit_saves_against_recency() -> None:
    """An old long prompt and a recent short one: with alpha 0 the old one goes, else the one that saves less."""
    served = session("long", (1500, 1, 0.0)), session("short", (10, 1, 0.0), start=5000)
    for alpha, first in ((0.0, 1500), (4.0, 10)):
        system, order = marconi(flop_aware(COSTS, alpha), *served)
        unit = order.victim(lambda _: True)
        assert unit is not None and unit.kind is Kind.BUNDLE
        assert sum(len(system.contents.runs[name].pages) for name in unit.nodes) == first
    with pytest.raises(ValueError, match="alpha -1"):
        flop_aware(COSTS, -1)


def test_marconi_scales_checkpoints_without_the_tails_that_go_before_them() -> None:
    """Were the tail's zeros in the scaling, the short prompt would go before the long one."""
    served = [session("long", (1500, 1, 0.0)), session("short", (10, 1, 0.0), start=5000)]
    system, order = marconi(flop_aware(COSTS, 0.9), *served, session("tail", (300, 1, 0.0), start=9000))
    (run,) = [run for run in system.contents.runs.values() if run.end == 300 and run.states]
    system.contents.set_state(run, len(run.pages), Tier.DEVICE, False)
    system.contents.clock += 1  # ranks anew
    sizes = []
    while (unit := order.victim(lambda _: True)) is not None and len(sizes) < 3:
        assert unit.kind is Kind.BUNDLE
        sizes.append(sum(len(system.contents.runs[name].pages) for name in unit.nodes))
        system.evict(Tier.DEVICE, unit)
    assert sizes == [300, 1500, 10]


def test_marconi_keeps_the_states_of_forks_and_gives_up_those_of_single_children_alone() -> None:
    fork = Session(
        "s",
        64,
        tuple(
            Turn(6401, 1, (*range(50), *range(at, at + 50)), 0, 1, 0) for at in (1000, 2000, 3000)
        ),
    )  # fmt: skip
    _, order = marconi(flop_aware(COSTS, 0.0), fork, session("t", (40, 100, 0.0), start=9000))
    kinds = []
    while (unit := order.victim(lambda _: True)) is not None and len(kinds) < 20:
        kinds.append((unit.kind, None if unit.checkpoint is None else unit.checkpoint[1] // 64))
        if len(kinds) == len(set(kinds)) == 5:
            break
    assert (Kind.INTERMEDIATE, 50) not in kinds  # three children hang on it
    assert any(kind is Kind.INTERMEDIATE for kind, _ in kinds)  # the end of t's prompt, its answer goes on


def test_places_stay_right_when_making_room_splits_their_run() -> None:
    """Each checkpoint of a long run needs room on the SSD; what has to go for it lies in the same run."""
    tight = Budgets(45 * GIB, 20 * GIB, 12 * COSTS.state_bytes)
    clock = Clock()
    system = HiState(COSTS, tight, clock.at, placement=Many(), order=queue(COSTS, Eviction.LRU))
    turns = [(40 * n, 1, 0.0) for n in range(1, 20)]
    serve(system, clock, [session("s", *turns), session("t", *turns, start=9000)], live=2)
    for run in system.contents.runs.values():
        assert all(0 < page <= len(run.pages) for page in run.states)
        mirrored = system.contents.tree.checkpoints(run.id) if run.parent is not None else ()
        assert {offset // 64 for offset, _ in mirrored} == set(run.states)


def test_a_place_is_found_after_its_run_was_split() -> None:
    clock = Clock()
    system = Cascade(COSTS, Budgets(), clock.at, placement=Ends(), order=queue(COSTS, Eviction.LRU))
    serve(system, clock, [session("s", (100, 1, 0.0))])
    contents = system.contents
    (run,) = [run for run in contents.runs.values() if run.parent is not None]
    place = run, 30
    upper = contents.split(run, 40)
    assert contents.locate(place) == (upper, 30) and contents.locate((run, 100)) == (run, 60)
    contents.split(upper, 10)
    assert contents.locate(place) == (upper, 20)
    unit = system.kv_orders[Tier.HOST].victim(lambda _: True)
    assert unit is not None and unit.checkpoint == (run.id, 60 * 64)


def test_a_bundle_that_is_cut_takes_its_checkpoint_to_the_disk() -> None:
    """A branching point inside a run: its end leaves the host with the checkpoint there."""
    clock = Clock()
    budgets = Budgets(45 * GIB, 20 * GIB, 20 * GIB)
    system = Cascade(COSTS, budgets, clock.at, placement=Many(), order=queue(COSTS, Eviction.LRU))
    serve(system, clock, [session("s", (100, 1, 0.0))])
    unit = system.kv_orders[Tier.HOST].victim(lambda unit: unit.kind is Kind.BUNDLE)
    assert unit is not None and unit.cut is not None and unit.checkpoint is not None
    system.evict(Tier.HOST, unit)
    (end,) = [run for run in system.contents.runs.values() if run.end == 100]
    assert len(end.pages) == 1 and end.kv >> Tier.SSD & 1 and end.states[1].tiers >> Tier.SSD & 1
