"""Small random sessions and a machine to match, for the tests of the simulator."""

from __future__ import annotations

import random

from eval.records import Record
from eval.simulate.budgets import Budgets
from eval.simulate.costs import Costs
from eval.simulate.engine import Clock, Engine
from eval.simulate.loop import ClosedLoop
from eval.simulate.system import System
from eval.simulate.systems import SYSTEMS, Tuning
from eval.workloads.sessions import Agent, Session, Turn

COSTS = Costs(kv_token_bytes=1, state_bytes=640)
"""A page is 64 bytes, a checkpoint ten pages."""
PLENTY = Budgets(10**9, 10**9, 10**9)


def turns(draw: random.Random, count: int, names: list[int], longest: int = 30) -> tuple[Turn, ...]:
    """Turns that mostly append, sometimes drop an answer, rewrite the last block, go back, or start anew."""
    found: list[Turn] = []
    blocks: list[int] = []
    for index in range(count):
        kind = draw.random()
        keep = len(blocks)
        if index and kind < 0.35:
            keep = draw.choice([0, len(blocks) - 1, draw.randrange(len(blocks) + 1)])
        blocks = blocks[: max(keep, 0)]
        for _ in range(draw.randrange(1, longest)):
            names[0] += 1
            blocks.append(names[0])
        tail = draw.choice([0, 0, 1, 30, 63])
        output = draw.choice([1, 2, 64, 100, 300])
        found.append(Turn(len(blocks) * 64 + tail, output, tuple(blocks), 0.0, draw.uniform(0, 0.5), 0.0))
    return tuple(found)


def sessions(seed: int, count: int = 7, most_turns: int = 9, agents: bool = True) -> list[Session]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        names = [0]
        own = turns(draw, draw.randrange(1, most_turns), names)
        started = ()
        if agents and draw.random() < 0.5:
            started = tuple(
                Agent(f"a{n}", draw.randrange(-1, len(own)), draw.uniform(0, 2), turns(draw, 2, names))
                for n in range(draw.randrange(1, 3))
            )
        made.append(Session(f"s{number}", 64, own, started))
    return made


def tight(seed: int, name: str = "") -> Budgets:
    """Budgets that hold the largest request (8 turns of 29 blocks and an answer) and little more."""
    draw = random.Random(f"budgets {seed}")
    least = 64 * 240 + 640
    host = 20 * 640 + draw.randrange(1000, least)
    device = (least + draw.randrange(2000)) * (2 if name.startswith("hicache") else 1)  # it has two halves
    return Budgets(device, host, draw.randrange(3 * least))


def build(name: str, budgets: Budgets, costs: Costs = COSTS) -> tuple[System, Clock]:
    clock = Clock()
    return SYSTEMS[name].build(costs, budgets, clock.at, Tuning()), clock


def serve(system: System, clock: Clock, served: list[Session], live: int = 6) -> list[Record]:
    records: list[Record] = []
    Engine(system, clock, COSTS, ClosedLoop(served, live, 10.0), records.append, 1152).run()
    return records
