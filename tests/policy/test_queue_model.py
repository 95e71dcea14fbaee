"""Thousands of random changes: the same costs and victims as the naive model, in every pool and mode."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool
from tests.policy.prefix_model import Model

STATE, KV = 40, 7
POOLS = {
    "device unified": Pool(Tier.DEVICE, STATE, KV),
    "device states": Pool(Tier.DEVICE, STATE, 0),
    "device kv": Pool(Tier.DEVICE, 0, KV),
    "host": Pool(Tier.HOST, STATE, KV),
    "ssd": Pool(Tier.SSD, STATE, KV),
    "ssd states": Pool(Tier.SSD, STATE, 0),
}
TAU = 30.0


class Walk:
    """Random changes, applied to the tree and to the model alike."""

    def __init__(self, seed: int, max_nodes: int = 22) -> None:
        self.random = random.Random(seed)
        self.tree, self.model = PrefixTree(), Model()
        self.max_nodes = max_nodes
        self.now = 0
        self.last_id = 0

    def both(self, name: str, *arguments: int | Tier | bool) -> None:
        getattr(self.tree, name)(*arguments)
        getattr(self.model, name)(*arguments)

    def new_id(self) -> int:
        self.last_id += self.random.randint(1, 3)
        return self.last_id

    def place(self) -> tuple[int, int]:
        """A position, most often a checkpoint's or a node's end."""
        node = self.random.choice(list(self.model.runs))
        run = self.model.runs[node]
        if run.states and self.random.random() < 0.5:
            return node, self.random.choice(sorted(run.states))
        tokens = len(run.used)
        return node, tokens if self.random.random() < 0.5 else self.random.randint(0, tokens)

    def step(self) -> None:
        pick, runs, choice = self.random.random(), self.model.runs, self.random.choice
        if not runs or (pick < 0.12 and len(runs) < self.max_nodes):
            # Half of them continue a trajectory.
            parent = choice([0, *runs]) if pick < 0.06 or not runs else choice(self.model.leaves())
            node = self.new_id()
            self.both("add", node, parent, self.random.randint(1, 9))
            for tier in Tier:
                if self.random.random() < 0.5:
                    self.both("set_kv", node, tier, True)
        elif pick < 0.16:
            node = choice(list(runs))
            if len(runs[node].used) > 1 and len(runs) < self.max_nodes:
                self.both("split", node, self.new_id(), self.random.randint(1, len(runs[node].used) - 1))
        elif pick < 0.16 + (0.08 if len(runs) > self.max_nodes // 2 else 0.03):
            self.both("remove", choice(self.model.leaves()))
        elif pick < 0.4:
            self.both("set_kv", choice(list(runs)), choice(list(Tier)), self.random.random() < 0.6)
        elif pick < 0.62:
            node, offset = self.place()
            self.both("set_checkpoint", node, max(offset, 1), choice(list(Tier)), self.random.random() < 0.55)
        elif pick < 0.9:
            self.now += self.random.randint(0, 2)
            node, offset = self.place()
            if self.random.random() < 0.05:
                node, offset = 0, 0
            self.both("touch", node, offset, self.now)
        elif pick < 0.93:
            node, offset = self.place()
            self.both("keep", node, offset, choice([0, self.now + self.random.randint(0, 40)]))
        elif pick < 0.95:
            node = choice(list(runs))
            self.both("forsake", node, choice([0, self.model.start(node), self.model.start(node) + 3]))
        else:
            # Long runs of one kind, so that the priced q moves.
            for _ in range(24):
                self.both("observe_hit", *self.place())


def as_tuple(unit):
    return (
        unit.score,
        unit.kind.value,
        unit.checkpoint,
        unit.has_state,
        unit.nodes,
        unit.cut,
        unit.bytes,
        unit.cost_tokens,
        unit.last_access,
    )


def refuse(count: int):
    """A `usable` that refuses the first `count` units it is asked about."""
    asked = []

    def usable(unit):
        asked.append(unit)
        return len(asked) > count

    return usable


@pytest.mark.parametrize("seed", range(5))
def test_random_changes_cost_and_rank_as_in_the_model(seed: int) -> None:
    walk = Walk(seed)
    queues = {
        (name, mode): EvictionQueue(walk.tree, pool, KV, TAU, mode)
        for name, pool in POOLS.items()
        for mode in Eviction
    }
    compared = 0
    steps_of_q = set()
    for step in range(2000):
        walk.step()
        steps_of_q.add(walk.tree.end_share.steps)
        if step % 10:
            continue
        costs = walk.model.costs()
        for (node, offset), (rounded, exact) in costs.items():
            assert walk.tree.cost_tokens(node, offset) == float(rounded)
            assert abs(rounded - exact) < Fraction(1, 2**25)
        for (name, mode), queue in queues.items():
            pool = POOLS[name]
            expected = walk.model.ranked(
                pool.tier, pool.state_bytes, pool.kv_token_bytes, KV, TAU, mode.value, costs
            )
            expected = [unit[:1] + unit[2:] for unit in expected]
            assert len(queue) == len(expected), (step, name, mode)
            for skip in sorted({0, 1, walk.random.randint(0, len(expected)), len(expected)}):
                found = queue.victim(refuse(skip))
                if skip >= len(expected):
                    assert found is None
                else:
                    assert found is not None and as_tuple(found) == expected[skip], (step, name, mode, skip)
                    compared += 1
            if step % 100 == 0:
                assert [as_tuple(unit) for unit in queue.ranked()] == expected, (step, name, mode)
    assert compared > 5000
    assert len(steps_of_q) > 1
