"""The simulator's decisions are those of the server's policy code, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulate_traces import COSTS, serve, sessions, tight

from eval.simulate.budgets import Budgets
from eval.simulate.contents import Contents
from eval.simulate.costs import Costs
from eval.simulate.engine import Clock
from eval.simulate.histate import HiState
from eval.simulate.orders import Order, queue
from eval.simulate.placement import Adaptive, EveryBlocks, Learned, Segment, StepEnds
from eval.workloads.sessions import Session, Turn
from sglang_histate.policy.capture_plan import plan_positions
from sglang_histate.policy.interval import NO_INTERVAL, IntervalPolicy, choose_interval
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit

CHANGES = ("add", "split", "remove", "set_kv", "set_checkpoint", "touch", "observe_hit")


class Log:
    """Everything that was told to the policy's tree, and every victim with what was refused before it."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.pools: list[Pool] = []

    def order(self, contents: Contents, pool: Pool) -> Order:
        if not self.pools:
            for name in CHANGES:
                setattr(contents.tree, name, self._heard(name, getattr(contents.tree, name)))
        self.pools.append(pool)
        return Heard(self, len(self.pools) - 1, queue(COSTS, Eviction.SCORE)(contents, pool))

    def _heard(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def heard(*args: Any) -> None:
            self.lines.append((name, *args))
            call(*args)

        return heard


class Heard:
    def __init__(self, log: Log, number: int, order: Order) -> None:
        self.pool = order.pool
        self._log, self._number, self._order = log, number, order

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        answers: list[tuple[Unit, bool]] = []

        def asked(unit: Unit) -> bool:
            answers.append((unit, usable(unit)))
            return answers[-1][1]

        found = self._order.victim(asked)
        self._log.lines.append(("victim", self._number, answers, found))
        return found


@pytest.mark.parametrize("seed", range(10))
def test_victims_follow_from_what_the_tree_was_told_alone(seed: int) -> None:
    """The log of a run, fed to a second tree and second queues, gives the same victims: nothing else has a say."""
    log, clock = Log(), Clock()
    placement = Adaptive(IntervalPolicy(), COSTS.state_tokens)
    system = HiState(COSTS, tight(seed), clock.at, placement=placement, order=log.order)
    serve(system, clock, sessions(seed))

    tree, victims = PrefixTree(), 0
    queues = [EvictionQueue(tree, pool, COSTS.kv_token_bytes) for pool in log.pools]
    for name, *args in log.lines:
        if name != "victim":
            getattr(tree, name)(*args)
            continue
        number, answers, found = args
        left = iter(answers)

        def usable(unit: Unit, left=left) -> bool:
            expected, answer = next(left)
            assert unit == expected
            return answer

        assert queues[number].victim(usable) == found
        assert next(left, None) is None
        victims += found is not None
    assert victims > 30


@pytest.mark.parametrize(
    ("mode", "first"), [(Eviction.SCORE, "short"), (Eviction.LRU, "long"), (Eviction.LRU_REFRESH, "long")]
)
def test_the_ranking_decides_what_the_host_gives_up(mode: Eviction, first: str) -> None:
    """The end of an old prompt, 18 pages, and a newer prompt of 3: by the score the short one goes.

    A checkpoint is ten pages, so a byte of the old one saves 18 of 28 tokens, of the new one 3 of 13: times tau, 20
    requests, that is more than the one request of age. By the last access alone the old one goes.
    """
    clock = Clock()
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), COSTS.state_tokens)
    room = Budgets(10**5, 10**5, 10**6)
    system = HiState(COSTS, room, clock.at, placement=placement, order=queue(COSTS, mode))
    prompts = {"long": range(90), "short": range(1000, 1003)}
    served = [
        Session(name, 64, (Turn(64 * len(blocks) + 1, 1, tuple(blocks), 0.0, 0.0, 0.0),))
        for name, blocks in prompts.items()
    ]
    serve(system, clock, served, live=1)
    unit = system.kv_orders[Tier.HOST].victim(lambda unit: unit.kind is Kind.BUNDLE)
    assert unit is not None
    assert system.contents.runs[unit.nodes[0]].end == len(prompts[first])


def test_intervals_are_those_of_the_policy() -> None:
    policy = IntervalPolicy((64, 128, 256, NO_INTERVAL))
    for pressure in (1 / 16, 1.0, 16.0):
        placement = Adaptive(policy, 10.0)
        segment = Segment(128, 5000, None, pressure)
        interval = choose_interval(5000 - 128, policy.supported, 10.0, pressure)
        wanted = {at // 64 for at in plan_positions(128, 5000, interval, 64)} | {4999 // 64}
        assert placement.positions(segment) == tuple(sorted(wanted))
        assert placement.facts() == {"intervals": {str(interval or "none"): 1}}


def test_the_server_plan_has_the_branch_and_the_page_before_the_end() -> None:
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), 1572.0)
    assert placement.positions(Segment(640, 1920, 17, 1.0)) == (
        17,
        29,
    )  # 1,920 is a whole page: 30 is the end
    assert placement.positions(Segment(640, 1930, None, 1.0)) == (30,)
    assert placement.positions(Segment(640, 650, None, 1.0)) == ()
    assert placement.facts() == {"intervals": {"none": 3}}


def test_fixed_blocks_count_from_the_start_of_the_text() -> None:
    assert EveryBlocks(32).positions(Segment(64, 60_000, 5, 1.0)) == (5, 288, 576, 864, 937)
    assert EveryBlocks(32).positions(Segment(18_432, 36_864, None, 1.0)) == (575,)


def test_aligned_steps_end_on_blocks_of_576() -> None:
    placement = StepEnds()
    assert placement.chunk_tokens == 576 and placement.positions(Segment(0, 60_000, 5, 1.0)) == (5, 937)
    assert [placement.at_chunk_end(page) for page in (8, 9, 18, 19)] == [False, True, True, False]


def test_scarce_intervals_are_those_of_the_price() -> None:
    policy = IntervalPolicy()
    for price in (0.0, 4.0, 400.0):
        placement = Adaptive(policy, 1572.0, scarce=True)
        interval = choose_interval(50_000, policy.supported, price / 0.1)
        wanted = {at // 64 for at in plan_positions(0, 50_000, interval, 64)} | {781}
        assert placement.positions(Segment(0, 50_000, None, 1.0, price=price, inside=0.1)) == tuple(
            sorted(wanted)
        )
    nobody = Adaptive(policy, 1572.0, scarce=True)
    assert nobody.positions(Segment(0, 50_000, None, 1.0, price=4.0, inside=0.0)) == (781,)


def test_one_more_checkpoint_lies_a_page_below_the_last_whole_one() -> None:
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), 1572.0, below=True)
    assert placement.positions(Segment(0, 1930, None, 1.0)) == (29, 30)
    assert placement.positions(Segment(1856, 1930, None, 1.0)) == (30,)


def test_learned_places_follow_the_prior_and_keep_the_extra_positions() -> None:
    placement = Learned()
    assert placement.positions(Segment(0, 64_064, 17, 1.0, price=1e9)) == (17, 1000)
    for _ in range(200):
        placement.positions(Segment(0, 64_064, None, 1.0, parted=(244, 1000), price=1e9))
    (first, *_) = placement.positions(Segment(0, 64_064, None, 1.0, price=100.0))
    assert abs(first - 244) <= 11
    assert placement.facts()["planned"]["0"] == 201


def edited(turns: int, session: int, depth: int) -> Session:
    """A session that goes back to page `depth`, each time with other pages, from 64 on."""
    made, fresh = [], 0
    for _ in range(turns):
        blocks = [*range(depth), *range(10_000 + fresh, 10_000 + fresh + 150)]
        fresh += 150
        made.append(Turn(64 * len(blocks) + 1, 1, tuple(blocks), 0.0, 0.01, 0.0))
    return Session(f"edited {session}", 64, tuple(made))


def test_after_some_sessions_a_new_one_resumes_close_to_where_all_part_the_first_time() -> None:
    """All sessions go back to page 244. Later ones have a checkpoint within a bin of it when they do so first."""
    scale = 80_000  # of bytes: a write costs 4 tokens
    clock, real = Clock(), Costs(kv_token_bytes=scale, state_bytes=640 * scale)
    order = queue(real, Eviction.LOSS)
    room = Budgets(10**5 * scale, 10**6 * scale, 10**7 * scale)
    system = HiState(real, room, clock.at, placement=Learned(), order=order)
    served = [edited(2, number, 244) for number in range(40)]
    records = [record for record in serve(system, clock, served, live=1) if record.turn == 1]
    assert len(records) == 40
    missed = [244 - record.hit // 64 for record in records]
    assert all(pages <= 11 for pages in missed[20:])
    assert max(missed[:20]) > 11


def test_without_an_ssd_historical_checkpoints_go_to_the_host_if_prices_choose() -> None:
    turns = [edited(4, number, 83) for number in range(3)]
    hits = {}
    for by_price in (False, True):
        clock = Clock()
        placement = Adaptive(IntervalPolicy((1024,)), COSTS.state_tokens)
        room = Budgets(5 * 10**4, 10**6, 0)
        system = HiState(
            COSTS, room, clock.at, placement=placement, order=queue(COSTS, Eviction.SCORE), by_price=by_price
        )
        hits[by_price] = sum(record.hit for record in serve(system, clock, turns))
    assert hits[True] > hits[False]
