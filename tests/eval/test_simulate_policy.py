"""The simulator's decisions are those of the server's policy code, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulate_traces import COSTS, serve, sessions, tight

from eval.simulate.budgets import Budgets
from eval.simulate.contents import Contents
from eval.simulate.engine import Clock
from eval.simulate.histate import HiState
from eval.simulate.orders import Order, queue
from eval.simulate.placement import Adaptive, EveryBlocks, Segment, StepEnds
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
