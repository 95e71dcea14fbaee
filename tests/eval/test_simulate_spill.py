"""KV in records on the SSD: what a record has, when it is free again, and when KV is copied there."""

from __future__ import annotations

import random

import pytest
from simulate_traces import COSTS, build

from eval.simulate.budgets import Budgets, Space
from eval.simulate.contents import Contents
from eval.simulate.costs import Costs
from eval.simulate.engine import Clock, Engine
from eval.simulate.extents import Part
from eval.simulate.histate import BUFFERS, HiState
from eval.simulate.jobs import Job
from eval.simulate.loop import ClosedLoop
from eval.simulate.orders import queue
from eval.simulate.placement import Adaptive
from eval.simulate.radix import Run
from eval.workloads.sessions import Session, Turn
from sglang_histate.policy.interval import NO_INTERVAL, IntervalPolicy
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.score import Eviction

REAL = Costs()
PAGE = REAL.page_bytes
RECORD = REAL.state_bytes // PAGE
"""Pages in one record, 24."""


def histate(budgets: Budgets, sessions: list[Session], live: int = 9, packed: bool = False) -> HiState:
    clock = Clock()
    placement = Adaptive(IntervalPolicy((NO_INTERVAL,)), REAL.state_tokens)
    order = queue(REAL, Eviction.SCORE)
    system = HiState(REAL, budgets, clock.at, placement=placement, order=order, packed=packed)
    Engine(system, clock, REAL, ClosedLoop(sessions, live, 1e6), lambda _: None, 65_536).run()
    return system


def session(name: str, start: int, *blocks: int) -> Session:
    ids = range(start, start + max(blocks))
    turns = [Turn(64 * count + 1, 1, tuple(ids[:count]), 0.0, 1.0, 0.0) for count in blocks]
    return Session(name, 64, tuple(turns))


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_goes_on_over_the_ends_of_turns(packed: bool) -> None:
    """Ten turns of 11 pages; the host takes little more than one other prompt, so that all of it is spilled."""
    growing = session("s", 0, *(11 * n for n in range(1, 11)))
    host = 700 * PAGE + 20 * REAL.state_bytes
    others = [session(f"o{n}", 10_000 * n, 250) for n in range(1, 6)]
    system = histate(Budgets(300 * PAGE + 5 * REAL.state_bytes, host, 1 << 34), [growing, *others], 1, packed)
    runs = [run for run in system.contents.runs.values() if run.pages and run.pages[0] < 111]
    path = next(run for run in runs if run.end == 110)
    pieces = [piece for run in path.path() for piece in run.extents]
    assert sum(piece.pages for piece in pieces) == 110
    records = {id(piece.extent): piece.extent.size_bytes for piece in pieces}
    if packed:
        assert sum(records.values()) == 110 * PAGE
    else:
        assert list(records.values()) == [REAL.state_bytes] * -(-110 // RECORD)
        assert len(pieces) > len(records)


def test_the_marks_follow_the_largest_step() -> None:
    """Steps of 400 pages in a host of 2,000: the low mark is 600, not an eighth, which is not reached here."""
    budgets = Budgets(900 * PAGE, 2000 * PAGE + 20 * REAL.state_bytes, 1 << 36)
    system = histate(budgets, [session(f"s{n}", 10_000 * n, 400) for n in range(4)], live=1)
    host = system.contents.kv_space[Tier.HOST]
    assert host.free > host.limit // 8
    assert system.spill.pages > 0
    small = histate(budgets, [session(f"s{n}", 10_000 * n, 100) for n in range(14)], live=1)
    assert small.contents.kv_space[Tier.HOST].free < 600 * PAGE
    assert small.spill.pages == 0


class Naive:
    """Records as sets of prefixes, found anew by looking at all of them."""

    def __init__(self) -> None:
        self.records: list[list[tuple[int, ...]]] = []

    def pages(self, run: Run) -> list[tuple[int, ...]]:
        path = [page for one in reversed(list(run.path())) for page in one.pages]
        return [tuple(path[:end]) for end in range(run.start + 1, run.end + 1)]

    def held(self) -> set[tuple[int, ...]]:
        return {page for record in self.records for page in record}

    def drop(self, run: Run) -> None:
        own = set(self.pages(run))
        self.records = [record for record in self.records if min(record, key=len) not in own]
        if own <= self.held():
            self.records = [[page for page in record if page not in own] for record in self.records]


@pytest.mark.parametrize("seed", range(60))
def test_records_are_those_of_a_count_of_single_pages(seed: int) -> None:
    draw = random.Random(seed)
    spaces = [Space(tier.name, 10**9) for tier in Tier]
    contents, naive = Contents(COSTS, spaces, spaces, records=bool(seed % 3)), Naive()
    most, shared = 10, 0
    for _ in range(150):
        runs = [run for run in contents.runs.values() if run.parent is not None]
        kind = draw.random()
        if kind < 0.3 or not runs:
            pages = tuple(draw.randrange(3) + 10 * at for at in range(draw.randrange(1, 40)))
            for run in contents.extend(contents.root, pages, len(pages)):
                contents.set_kv(run, Tier.HOST, True)
        elif kind < 0.45:
            run = draw.choice(runs)
            if len(run.pages) > 1:
                contents.split(run, draw.randrange(1, len(run.pages)))
        elif kind < 0.8:
            run = draw.choice(runs)
            free = [page for one in run.path() for page in reversed(naive.pages(one))]
            end = draw.randrange(len(free))
            stretch: list[tuple[int, ...]] = []
            for page in free[end : end + draw.randrange(1, most)]:
                if page in naive.held():
                    break
                stretch.append(page)
            if not stretch:
                continue
            first, last = len(stretch[-1]) - 1, len(stretch[0])
            parts = [
                Part(one, max(first, one.start) - one.start, min(last, one.end) - max(first, one.start))
                for one in reversed(list(run.path()))
                if max(first, one.start) < min(last, one.end)
            ]
            contents.add_record(parts)
            shared += len(parts) > 1
            if seed % 3:
                naive.records.append(stretch)
            else:
                naive.records += [
                    [page for page in stretch if page in set(naive.pages(part.run))] for part in parts
                ]
        elif kind < 0.95:
            leaves = [run for run in runs if run.kv >> Tier.SSD & 1 and not below(run)]
            if leaves:
                run = draw.choice(leaves)
                naive.drop(run)
                contents.set_kv(run, Tier.SSD, False)
        else:
            run = draw.choice(runs)
            gone = {page for one in [run, *descendants(run)] for page in naive.pages(one)}
            naive.records = [[page for page in record if page not in gone] for record in naive.records]
            contents.forget(run)
        naive.records = [record for record in naive.records if record]
        if not seed % 3:  # a record that takes what it has is cut where its run is
            cut = []
            for record in naive.records:
                for run in contents.runs.values():
                    cut.append([page for page in record if page in set(naive.pages(run))])
            naive.records = [record for record in cut if record]
        held = naive.held()
        for run in contents.runs.values():
            if run.parent is None:
                continue
            own = set(naive.pages(run))
            assert sum(piece.pages for piece in run.extents) == len(own & held)
            assert bool(run.kv >> Tier.SSD & 1) == (own <= held) == contents.tree.has_kv(run.id, Tier.SSD)
        each = 640 if seed % 3 else 0
        assert spaces[Tier.SSD].used == sum(each or 64 * len(record) for record in naive.records)
    assert shared


def descendants(run: Run) -> list[Run]:
    found = list(run.children.values())
    for one in found:
        found.extend(one.children.values())
    return found


def below(run: Run) -> list[Run]:
    return [one for one in descendants(run) if one.kv >> Tier.SSD & 1]


def small(host_pages: int, device_bytes: int = 10**6) -> tuple[HiState, Clock]:
    """A machine whose host has so many pages for prefixes, a record ten."""
    system, clock = build(
        "histate", Budgets(device_bytes, BUFFERS * COSTS.state_bytes + 64 * host_pages, 10**6)
    )
    assert isinstance(system, HiState)
    return system, clock


def grown(system: HiState, first: int, *lengths: int, tiers: tuple[Tier, ...]) -> list[Run]:
    """A trajectory of one run for each length in pages, each with a checkpoint on the SSD; pages are named from `first` on."""
    contents, end = system.contents, 0
    pages = tuple(range(first, first + sum(lengths)))
    at, runs = contents.root, []
    for length in lengths:
        end += length
        (at,) = contents.extend(at, pages, end)
        for tier in tiers:
            contents.set_kv(at, tier, True)
        contents.set_state(at, length, Tier.SSD, True)
        runs.append(at)
    return runs


def test_a_trajectory_whose_last_pages_the_ssd_has_is_copied_to_its_beginning() -> None:
    system, clock = small(host_pages=100)
    _, middle, last = grown(system, 0, 60, 30, 3, tiers=(Tier.HOST,))
    system.contents.set_kv(last, Tier.SSD, True)
    system.spill.plan()
    clock.run_until(1.0)
    assert sum(piece.pages for piece in middle.extents) == 30


@pytest.mark.parametrize(("device_pages", "lets_go"), [(100, True), (101, False)])
def test_the_device_lets_go_of_copies_where_the_host_could_give_up_nothing_else(
    device_pages: int, lets_go: bool
) -> None:
    """Steps of ten pages, so fifteen are the mark. What was used least recently goes, and only from the device.

    A host that is smaller than the device is always full of copies: then none goes.
    """
    system, _ = small(host_pages=100, device_bytes=64 * device_pages)
    sessions: list[list[Run]] = [[], []]
    for number, most in enumerate((2, 7)):
        for count in range(1, most + 1):
            system.now_s += 1
            system.contents.clock += 1
            sessions[number] = grown(system, 1000 * number, *[10] * count, tiers=(Tier.DEVICE, Tier.HOST))
            system.contents.touch(sessions[number][-1], 10)
            assert all(run.kv >> Tier.DEVICE & 1 for runs in sessions for run in runs), "there is room"
            if (number, count) != (1, 7):
                system.spill.plan()
    assert system.contents.kv_space[Tier.HOST].free == 10 * 64
    system.spill.plan()
    (first, second), new = sessions
    assert (first.kv >> Tier.DEVICE & 1, second.kv >> Tier.DEVICE & 1) == (1, 0 if lets_go else 1)
    assert all(run.kv >> Tier.DEVICE & 1 for run in new)
    assert second.kv >> Tier.HOST & 1 and bool(second.extents) is lets_go, "it is copied to the SSD then"


def test_a_read_takes_no_room_that_the_host_has_not_when_its_kv_has_left_the_device() -> None:
    """The read is of the checkpoint alone; when it ends the KV is on the SSD only, and the host is full of other things."""
    system, clock = small(host_pages=20)
    (run,) = grown(system, 0, 10, tiers=(Tier.DEVICE, Tier.SSD))
    visit = system.arrive(Job("s", "", 0, tuple(range(10)), (), 641, 1, False), 0.0)
    assert visit.waits is not None
    grown(system, 1000, 10, tiers=(Tier.DEVICE, Tier.HOST))
    system.contents.set_kv(run, Tier.DEVICE, False)
    clock.run_until(1.0)
    assert visit.waits is None
    assert not system.contents.has_state(run, 10, Tier.HOST), "the KV takes the room that is left"
