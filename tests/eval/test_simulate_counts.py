"""Hits of the simulator against an independent count of single blocks."""

from __future__ import annotations

import dataclasses
import random

import pytest
from simulate_naive import LruDevice, counted_without_limits
from simulate_traces import COSTS, PLENTY, build, serve, sessions

from eval.simulate.budgets import Budgets
from eval.simulate.engine import Clock
from eval.simulate.jobs import Job, Naming
from eval.simulate.offload import Cascade
from eval.simulate.orders import queue
from eval.simulate.placement import Ends
from eval.workloads.sessions import Session
from sglang_histate.policy.score import Eviction


def one_by_one(served: list[Session]) -> list[Job]:
    """The requests in the order that a loop of one live session without agents makes."""
    naming = Naming()
    return [job for session in served for job in naming.jobs(session, "", session.turns)]


def interleaved(seed: int) -> list[Session]:
    """One session whose turns come from several, so that what a system keeps has to last."""
    draw = random.Random(seed)
    lists = [list(one.turns) for one in sessions(seed, 6, 8, agents=False)]
    turns = []
    while lists:
        chosen = draw.randrange(len(lists))
        turn = lists[chosen].pop(0)
        blocks = tuple(10_000 * id_of + block for id_of, block in ((chosen, b) for b in turn.blocks))
        turns.append(dataclasses.replace(turn, blocks=blocks))
        lists = [one for one in lists if one]
    return [Session("all", 64, tuple(turns))]


def branch(restored: int, tokens: int, had: int) -> set[int]:
    return {had} if had > restored else set()


def extras(restored: int, tokens: int, had: int) -> set[int]:
    """What the server keeps at any interval."""
    return branch(restored, tokens, had) | {(tokens - 1) // 64}


def fixed(restored: int, tokens: int, had: int) -> set[int]:
    return {at // 64 for at in range(32 * 576, tokens, 32 * 576)} | extras(restored, tokens, had)


def step_ends(restored: int, tokens: int, had: int) -> set[int]:
    """Chunks of 1,152 tokens, two blocks of 576, are cut to whole blocks."""
    ends, at = extras(restored, tokens, had), restored * 64
    while at + 1152 < tokens:
        at = (at + 1152) // 576 * 576
        ends.add(at // 64)
    return ends


def chunk_ends(restored: int, tokens: int, had: int) -> set[int]:
    """SGLang keeps the state after every chunk, here of 1,152 tokens."""
    return {at // 64 for at in range(restored * 64 + 1152, tokens, 1152)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("vllm-cpu", lambda *_: set()),
        ("vllm-disk", lambda *_: set()),
        ("marconi", branch),
        ("hicache-ends", branch),
        ("hicache", lambda *prompt: branch(*prompt) | chunk_ends(*prompt)),
        ("histate-none", lambda *prompt: extras(*prompt) | chunk_ends(*prompt)),
        ("histate-fixed32", lambda *prompt: fixed(*prompt) | chunk_ends(*prompt)),
        ("histate-align", step_ends),
        ("infinite", lambda restored, tokens, had: set(range(10**4))),
    ],
)
def test_hits_without_limits_are_those_that_counting_blocks_gives(name: str, inside, seed: int) -> None:
    served = interleaved(seed) if seed % 2 else sessions(seed, agents=False)
    jobs = one_by_one(served)
    counted = counted_without_limits(jobs, inside)
    if name == "infinite":  # a checkpoint after every page, also of answers
        counted = unlimited_bound(jobs)
    records = serve(*build(name, PLENTY), served, live=1)
    assert [one.hit // 64 for one in records] == counted
    assert sum(counted) > 0


def unlimited_bound(jobs: list[Job]) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    found = []
    for job in jobs:
        most = (job.prompt_tokens - 1) // 64
        found.append(max((n for n in range(most + 1) if job.prompt[:n] in seen), default=0))
        seen |= {job.pages[:n] for n in range(len(job.pages) + 1)}
    return found


@pytest.mark.parametrize("seed", range(25))
def test_hits_of_a_full_device_are_those_that_counting_blocks_gives(seed: int) -> None:
    served = interleaved(seed)
    jobs = one_by_one(served)
    largest = max(job.room_pages for job in jobs)
    limit = (largest + random.Random(seed).randrange(20, 200)) * 64 + 2 * 640
    clock = Clock()
    system = Cascade(
        COSTS, Budgets(limit, 0, 0), clock.at, placement=Ends(), order=queue(COSTS, Eviction.LRU)
    )
    records = serve(system, clock, served, live=1)
    naive = LruDevice(limit, 64, 640)
    assert [one.hit // 64 for one in records] == [naive.serve(job) for job in jobs]


def test_those_devices_were_full() -> None:
    """Else the test above would say nothing about eviction."""
    evicted = 0
    for seed in range(0, 25, 5):
        jobs = one_by_one(interleaved(seed))
        limit = (max(job.room_pages for job in jobs) + random.Random(seed).randrange(20, 200)) * 64 + 1280
        naive = LruDevice(limit, 64, 640)
        wanted = unlimited_bound(jobs)
        evicted += sum(naive.serve(job) < want for job, want in zip(jobs, wanted, strict=True))
    assert evicted > 20
