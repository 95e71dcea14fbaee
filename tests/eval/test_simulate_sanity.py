"""What must hold of every simulated system on every trace."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from simulate_traces import COSTS, PLENTY, build, serve, sessions, tight

from eval.simulate.contents import Contents
from eval.simulate.engine import DoesNotFit
from eval.simulate.offload import Cascade
from eval.simulate.orders import queue
from eval.simulate.placement import Ends
from eval.simulate.systems import SYSTEMS
from eval.simulate.tiered import Tiered
from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.score import Eviction

OFFLOAD = ("vllm-cpu", "vllm-disk", "hicache", "histate", "histate-lru")


def check(contents: Contents, idle: bool) -> None:
    """The tiers' books agree with what the tree says, and the policy's mirror does too."""
    used = {id(space): 0 for space in (*contents.kv_space, *contents.state_space)}
    extents = set()
    for run in contents.runs.values():
        if run is contents.root:
            continue
        assert run.kv, "a run that no tier has is still there"
        assert contents.tree.start(run.id) == run.start * 64
        assert contents.tree.tokens(run.id) == len(run.pages) * 64
        for tier in TIERS:
            here = bool(run.kv >> tier & 1)
            assert contents.tree.has_kv(run.id, tier) == here
            if here and tier is not Tier.SSD:
                used[id(contents.kv_space[tier])] += contents.kv_bytes(run)
        assert contents.extents.covered(run) == bool(run.kv >> Tier.SSD & 1)
        assert sum(part.pages for part in contents.extents.missing(run)) == len(run.pages) - sum(
            piece.pages for piece in run.extents
        )
        assert all(piece.extent.runs.count(run) == 1 for piece in run.extents)
        extents |= {piece.extent for piece in run.extents}
        for page, state in run.states.items():
            assert (state.run, state.page) == (run, page) and 0 < page <= len(run.pages)
            for tier in TIERS:
                used[id(contents.state_space[tier])] += contents.state_size(tier) * (state.tiers >> tier & 1)
        mirrored = {
            offset // 64: sum(1 << t for t in tiers) for offset, tiers in contents.tree.checkpoints(run.id)
        }
        assert mirrored == {page: state.tiers for page, state in run.states.items()}
        if idle:
            assert not run.device_locks and not run.host_locks
    used[id(contents.kv_space[Tier.SSD])] += sum(extent.size_bytes for extent in extents)
    for extent in extents:  # all on one path, the uppermost first
        for above, below in pairwise(extent.runs):
            assert above in below.path()
    if idle:
        for space in (*contents.kv_space, *contents.state_space):
            assert space.used == used[id(space)] and not space.pinned


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", range(7))
def test_no_system_restores_more_than_the_infinite_one_and_all_books_agree(name: str, seed: int) -> None:
    served = sessions(seed)
    system, clock = build(name, tight(seed, name))
    records = serve(system, clock, served)
    bound = {one.key: one.hit for one in serve(*build("infinite", PLENTY), served)}
    assert len(records) == len(bound) == sum(one.requests for one in served)
    for one in records:
        assert one.hit <= bound[one.key] == one.reusable <= one.prompt_tokens - 1
        assert one.hit <= (one.kv_match or 0) <= one.reusable
        assert one.eligible_s <= one.sent_s < one.first_token_s <= one.end_s
        assert (one.checkpoint_tier in ("device", "host", "ssd")) == (one.hit > 0)
    if isinstance(system, Tiered):
        clock.run_until(float("inf"))  # reads whose requests gave up
        check(system.contents, idle=True)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["vllm-disk", "hicache", "histate"])
def test_budgets_hold_at_every_event(name: str, seed: int, share: float) -> None:
    """`Space` refuses more than its limit; here the tree's own sum is compared after every call."""
    budgets = tight(seed + 100, name)
    system, clock = build(name, budgets, dataclasses.replace(COSTS, ssd_state_share=share))
    assert isinstance(system, Tiered)
    calls = 0

    def watch(call):
        def watched(*args):
            nonlocal calls
            found = call(*args)
            calls += 1
            check(system.contents, idle=False)
            for tier, limit in zip(TIERS, dataclasses.astuple(budgets), strict=True):
                spaces = {
                    id(space): space
                    for space in (system.contents.kv_space[tier], system.contents.state_space[tier])
                }
                assert sum(space.used for space in spaces.values()) <= limit
            return found

        return watched

    for step in ("arrive", "admit", "computed", "finish"):
        setattr(system, step, watch(getattr(system, step)))
    serve(system, clock, sessions(seed + 100))
    assert calls > 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", OFFLOAD)
def test_with_room_for_everything_only_placement_keeps_a_system_from_the_bound(name: str, seed: int) -> None:
    for one in serve(*build(name, PLENTY), sessions(seed)):
        assert one.kv_match == one.reusable


class EveryPage(Ends):
    def positions(self, segment):
        return tuple(range(segment.start // 64 + 1, segment.end // 64 + 1))


@pytest.mark.parametrize("name", OFFLOAD)
def test_with_a_checkpoint_after_every_page_it_reaches_the_bound_in_prompts(name: str) -> None:
    """Answers get one checkpoint at their end, so what ends inside an answer may be up to that answer short."""
    short = 0
    for seed in range(8):
        system, clock = build(name, PLENTY)
        assert isinstance(system, Tiered)
        system.placement = EveryPage()
        system.buffers = 10**6  # of histate: none is short
        for one in serve(system, clock, sessions(seed)):
            assert one.reusable - one.hit <= 300
            short += one.hit < one.reusable
    assert short < 12


@pytest.mark.parametrize("name", SYSTEMS)
def test_same_seed_same_records(name: str) -> None:
    first, second = (serve(*build(name, tight(5, name)), sessions(5)) for _ in range(2))
    assert first == second


def test_more_of_every_tier_never_costs_lru_anything_worth_naming() -> None:
    """Not exact: other sizes make other times, and so other orders."""
    small = serve(*build("vllm-disk", tight(3)), sessions(3))
    large = serve(*build("vllm-disk", PLENTY), sessions(3))
    assert sum(one.hit for one in large) >= sum(one.hit for one in small)


def test_a_request_larger_than_the_device_is_an_error_that_names_it() -> None:
    budgets = dataclasses.replace(PLENTY, device_bytes=64 * 3)
    with pytest.raises(DoesNotFit, match=r"session s\d, turn 0: .* do not fit the device: give it more"):
        serve(*build("vllm-cpu", budgets), sessions(1, agents=False))


def test_a_system_without_ssd_never_waits_for_it() -> None:
    system, clock = build("vllm-cpu", tight(2))
    assert isinstance(system, Cascade)
    serve(system, clock, sessions(2))
    assert system.facts()["ssd_read_bytes"] == system.facts()["ssd_written_bytes"] == 0


def test_halves_leave_less_for_kv() -> None:
    def kept(halves: bool) -> int:
        _, clock = build("none", PLENTY)
        order = queue(COSTS, Eviction.LRU)
        budgets = dataclasses.replace(tight(7), host_bytes=0, ssd_bytes=0, device_bytes=64 * 520)
        system = Cascade(COSTS, budgets, clock.at, placement=Ends(), order=order, halves=halves)
        serve(system, clock, sessions(7, agents=False))
        return system.facts()["peak_bytes"]["device KV" if halves else "device"]

    assert kept(True) <= 64 * 260 < kept(False)
