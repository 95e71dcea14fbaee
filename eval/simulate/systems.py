"""The systems under test by name, each with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eval.simulate.bounds import Infinite, NoCache
from eval.simulate.budgets import Budgets
from eval.simulate.costs import Costs
from eval.simulate.histate import HiState
from eval.simulate.marconi import DEFAULT_ALPHA, flop_aware
from eval.simulate.offload import Cascade, Through
from eval.simulate.orders import queue
from eval.simulate.placement import Adaptive, Ends, EveryBlocks, EveryPages, Learned, Placement, StepEnds
from eval.simulate.system import Schedule, System
from sglang_histate.policy.interval import NO_INTERVAL, IntervalPolicy
from sglang_histate.policy.score import DEFAULT_TAU, Eviction

BF16_SHARE = 0.511
"""Bytes of a checkpoint on the SSD with --histate-checkpoint-dtype bf16: its convolution windows are bf16 anyway."""

TAIL_TOKENS = 2048
"""Of --histate-step-tail: a quarter of a step of 8,192."""

NO_SHARE = 1e-6
"""A checkpoint of some bytes: as good as none."""


@dataclass(frozen=True)
class Tuning:
    """What may be changed about a system beside its budgets."""

    tau: float = DEFAULT_TAU
    marconi_alpha: float = DEFAULT_ALPHA
    write_rate: int | None = None
    """Bytes per second that HiState writes to the SSD at most, as --histate-ssd-write-rate; None: no limit."""


@dataclass(frozen=True)
class Recipe:
    """How to build a system, and one line about it."""

    about: str
    build: Callable[[Costs, Budgets, Schedule, Tuning], System]


def _histate(
    eviction: Eviction = Eviction.SCORE,
    placement: Placement | None = None,
    interval: IntervalPolicy | None = None,
    packed: bool = False,
    scarce: bool = False,
    below: bool = False,
    learned: bool = False,
    by_price: bool = False,
    share: float | None = None,
    tail_tokens: int = 0,
) -> Callable[[Costs, Budgets, Schedule, Tuning], System]:
    def build(costs: Costs, budgets: Budgets, schedule: Schedule, tuning: Tuning) -> System:
        if share is not None:
            costs = replace(costs, ssd_state_share=share)
        adaptive = Adaptive(interval or IntervalPolicy(), costs.state_tokens, scarce, below)
        where = placement or (Learned() if learned else adaptive)
        order = queue(costs, eviction, tuning.tau)
        return HiState(
            costs,
            budgets,
            schedule,
            placement=where,
            order=order,
            packed=packed,
            by_price=by_price,
            tail_tokens=tail_tokens,
            write_rate=tuning.write_rate,
        )

    return build


def _marconi(costs: Costs, budgets: Budgets, schedule: Schedule, tuning: Tuning) -> System:
    device_only = replace(budgets, host_bytes=0, ssd_bytes=0)
    order = flop_aware(costs, tuning.marconi_alpha)
    return Cascade(costs, device_only, schedule, placement=Ends(branches=True), order=order)


def _vllm_cpu(costs: Costs, budgets: Budgets, schedule: Schedule, tuning: Tuning) -> System:
    return _vllm_disk(costs, replace(budgets, ssd_bytes=0), schedule, tuning)


def _vllm_disk(costs: Costs, budgets: Budgets, schedule: Schedule, tuning: Tuning) -> System:
    return Cascade(costs, budgets, schedule, placement=Ends(), order=queue(costs, Eviction.LRU))


def _hicache(chunk_ends: bool) -> Callable[[Costs, Budgets, Schedule, Tuning], System]:
    def build(costs: Costs, budgets: Budgets, schedule: Schedule, tuning: Tuning) -> System:
        placement = Ends(branches=True, chunk_ends=chunk_ends)
        order = queue(costs, Eviction.LRU)
        return Through(costs, budgets, schedule, placement=placement, order=order, halves=True)

    return build


SYSTEMS: dict[str, Recipe] = {
    "none": Recipe("no cache", lambda costs, budgets, schedule, tuning: NoCache(costs, budgets)),
    "marconi": Recipe("device only; ends and branching points; FLOP-aware eviction", _marconi),
    "vllm-cpu": Recipe("device and host, LRU; ends", _vllm_cpu),
    "vllm-disk": Recipe("device, host and disk, LRU, what leaves the host goes to disk; ends", _vllm_disk),
    "hicache": Recipe(
        "SGLang's HiCache: halves for KV and states, LRU, write-through to disk; ends, branching points, ends of chunks",
        _hicache(chunk_ends=True),
    ),
    "hicache-ends": Recipe(
        "the same without the ends of chunks, as later versions of SGLang do unasked",
        _hicache(chunk_ends=False),
    ),
    "histate": Recipe("the policy as the server does it", _histate()),
    "histate-lru": Recipe("histate, least recently used goes first", _histate(Eviction.LRU)),
    "histate-lru-refresh": Recipe(
        "histate, LRU with a hit refreshing all earlier checkpoints", _histate(Eviction.LRU_REFRESH)
    ),
    "histate-align": Recipe(
        "histate, checkpoints where a step ends on a block of 576 tokens", _histate(placement=StepEnds())
    ),
    "histate-fixed32": Recipe(
        "histate, a checkpoint every 32 blocks of 576 tokens", _histate(placement=EveryBlocks(32))
    ),
    "histate-none": Recipe(
        "histate, no interior checkpoints", _histate(interval=IntervalPolicy((NO_INTERVAL,)))
    ),
    "histate-packed": Recipe(
        "histate, KV takes on the SSD what it has and not whole records", _histate(packed=True)
    ),
    "histate-scarce": Recipe("histate, storage priced by what is evicted", _histate(scarce=True)),
    "histate-below": Recipe(
        "histate, one more checkpoint a page below the prompt's end", _histate(below=True)
    ),
    "histate-bf16": Recipe("histate, checkpoints as bf16 on the SSD", _histate(share=BF16_SHARE)),
    "histate-tiers": Recipe(
        "histate, historical checkpoints go to the tier where they cost least", _histate(by_price=True)
    ),
    "histate-learned": Recipe(
        "histate, checkpoints where hits are expected, priced by what is evicted", _histate(learned=True)
    ),
    "histate-loss": Recipe("histate, what is expected to be lost least goes first", _histate(Eviction.LOSS)),
    "histate-learned-loss": Recipe(
        "learned, and what is expected to be lost least goes first",
        _histate(Eviction.LOSS, learned=True),
    ),
    "histate-tail": Recipe(
        f"histate, {TAIL_TOKENS:,} more tokens of a step for prompts that end with them",
        _histate(tail_tokens=TAIL_TOKENS),
    ),
    "histate-all": Recipe(
        f"learned, expected loss, bf16, {TAIL_TOKENS:,} more tokens of a step for prompts that end with them",
        _histate(Eviction.LOSS, learned=True, share=BF16_SHARE, tail_tokens=TAIL_TOKENS),
    ),
    "histate-all-tiers": Recipe(
        "the same, and historical checkpoints go to the tier where they cost least",
        _histate(Eviction.LOSS, learned=True, by_price=True, share=BF16_SHARE, tail_tokens=TAIL_TOKENS),
    ),
    "histate-dense": Recipe(
        "expected loss, bf16, a checkpoint after every 8 pages at no price: the densest even grid that the SSD bears "
        "under the rewriting workload",
        _histate(Eviction.LOSS, placement=EveryPages(8), share=BF16_SHARE, tail_tokens=TAIL_TOKENS),
    ),
    "histate-free": Recipe(
        "no system but a bound: a checkpoint after every page that takes no room, no link and no read; KV by the byte in "
        "the same tiers",
        _histate(Eviction.LOSS, placement=EveryPages(), packed=True, share=NO_SHARE),
    ),
    "infinite": Recipe(
        "never evicts, a checkpoint after every page, all on the device",
        lambda costs, budgets, schedule, tuning: Infinite(),
    ),
}
