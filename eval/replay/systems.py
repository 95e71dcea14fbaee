"""The systems that are compared, their flags, and how much each may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.internal_hits import systems as servers
from eval.internal_hits.budgets import Budgets, Holdings, Units
from eval.internal_hits.systems import Setup
from eval.replay.recorded_tokens import SERVER_FLAG
from eval.replay.requests import PAGE

# Recorded tokens: both shrink as prompts do, else no replayed prompt would have an end of a chunk in it.
CHUNK = 8192
FIXED_INTERVAL = 2048
TAIL = 2048


def scaled(recorded: int, scale: float) -> int:
    """Return `recorded` tokens as sent, `scale` tokens for each, in whole pages and at least one."""
    return max(round(recorded * scale / PAGE), 1) * PAGE


@dataclass(frozen=True)
class System:
    """`base` names the command line of `eval.internal_hits.systems` that `flags` are added to.

    `interval`: recorded tokens between fixed checkpoints, None for a system without. `tail`: recorded tokens by which steps
    are longer for prompts that end in them.
    """

    name: str
    base: str
    flags: tuple[str, ...]
    description: str
    interval: int | None = None
    tail: int = 0

    def flags_at(self, scale: float) -> tuple[str, ...]:
        """Return the flags where so many tokens are sent for a recorded one."""
        if self.interval is None:
            return self.flags
        return (*self.flags, "--histate-interval", f"fixed:{scaled(self.interval, scale)}")

    def tail_at(self, scale: float) -> int:
        """Return the step's tail, in tokens, where so many are sent for a recorded one."""
        return scaled(self.tail, scale) if self.tail else 0

    @property
    def has_histate(self) -> bool:
        return self.base == servers.HISTATE

    @property
    def has_disk(self) -> bool:
        return self.base in (servers.HISTATE, servers.HICACHE)

    @property
    def has_cache(self) -> bool:
        return self.base != servers.NO_CACHE


def _histate(name: str, flags: tuple[str, ...], description: str, interval: int | None = None) -> System:
    return System(name, servers.HISTATE, flags, description, interval)


# What SGLang's users get by default on the device: states have 0.9 times the bytes of KV (--mamba-full-memory-ratio).
STATE_SHARE = 0.9 / 1.9
_ABLATION = "HiState, but "
SYSTEMS = {
    system.name: system
    for system in (
        _histate(
            "histate",
            (),
            "HiState: one device pool, one host arena, SSD tier, score eviction, adaptive interval",
        ),
        System(
            "hicache",
            servers.HICACHE,
            (),
            "stock SGLang HiCache: host tier and file tier, written through, prefetch waited for, a state tracked at "
            "every page of an answer; device split as by SGLang's default (states 47 % of the bytes)",
        ),
        System(
            "stock",
            servers.STOCK,
            (),
            "stock SGLang without offload: states at prompt, chunk and answer ends, tracked at every page of an answer, "
            "and where a second prompt was seen to branch off; evicts by LRU, where Marconi weighs FLOPs saved per byte",
        ),
        System("nocache", servers.NO_CACHE, (), "stock SGLang without a prefix cache"),
        _histate("histate-lru", ("--histate-eviction", "lru"), _ABLATION + "eviction by last access"),
        _histate(
            "histate-lru-refresh",
            ("--histate-eviction", "lru-refresh"),
            _ABLATION + "eviction by last access, a hit counts for every earlier checkpoint of its prefix",
        ),
        _histate(
            "histate-align",
            ("--histate-interval", "align"),
            _ABLATION + "checkpoints only where a scheduler step ends on a page boundary",
        ),
        _histate(
            "histate-fixed",
            (),
            _ABLATION + f"a checkpoint every {FIXED_INTERVAL} recorded tokens, scaled as the prompts are",
            FIXED_INTERVAL,
        ),
        _histate(
            "histate-none", ("--histate-interval", "none"), _ABLATION + "no checkpoints inside a prompt"
        ),
        _histate(
            "histate-scarce",
            ("--histate-interval", "scarce"),
            _ABLATION + "storage priced by what the SSD gives up",
        ),
        _histate(
            "histate-learned",
            ("--histate-interval", "learned"),
            _ABLATION + "checkpoints where hits are expected, at that price",
        ),
        _histate(
            "histate-loss",
            ("--histate-eviction", "loss"),
            _ABLATION + "eviction by what is expected to be lost",
        ),
        _histate(
            "histate-learned-loss",
            ("--histate-interval", "learned", "--histate-eviction", "loss"),
            _ABLATION + "both of these",
        ),
        replace(
            _histate(
                "histate-all",
                (
                    "--histate-interval",
                    "learned",
                    "--histate-eviction",
                    "loss",
                    "--histate-checkpoint-dtype",
                    "bf16",
                ),
                _ABLATION
                + f"both of these, checkpoints as bf16 on the SSD, and {TAIL} more recorded tokens of a step for prompts "
                "that end with them, scaled as the prompts are",
            ),
            tail=TAIL,
        ),
    )
}


@dataclass(frozen=True)
class Bytes:
    """What each system may hold, in bytes; every system gets the same. `inflight` is part of `host`."""

    device: int
    host: int
    disk: int
    inflight: int

    def scaled(self, factor: float) -> Bytes:
        device, host, disk = (round(factor * one) for one in (self.device, self.host, self.disk))
        return Bytes(device, host, disk, self.inflight)


# HiState's paper: GPU 45 GiB, host 96 GiB, disk 150 GiB; its Weka selection has about 510 GiB of different KV.
PAPER_SHARES = (45 / 510, 96 / 510, 150 / 510)


def in_proportion(kv_bytes: int, inflight: int) -> Bytes:
    """Return budgets that are to `kv_bytes`, the bytes of KV of all different pages, as the paper's are to its own."""
    device, host, disk = (round(share * kv_bytes) for share in PAPER_SHARES)
    return Bytes(device, host, disk, inflight)


class TooSmall(ValueError):
    """A budget cannot hold what a server needs; the message is one sentence."""


def split(given: Bytes, units: Units, longest: int, running: int) -> Budgets:
    """Turn bytes into the servers' flags: tokens of KV, states, and the host's ratio to the device.

    Raises:
        TooSmall: the device cannot hold the longest prompt and the states of so many running requests, or the host
            no more than what is in flight.
    """
    # A running request has a state of its own and two that its answer's track alternates between.
    states = max(round(STATE_SHARE * given.device / units.checkpoint_bytes), 3 * running + 1)
    kv_tokens = (
        int((given.device - states * units.checkpoint_bytes) / units.kv_bytes_per_token) // PAGE * PAGE
    )
    needed = (longest // PAGE + 2) * PAGE
    if kv_tokens < needed:
        least = needed * units.kv_bytes_per_token + states * units.checkpoint_bytes
        raise TooSmall(
            f"{given.device} bytes of device memory hold {max(kv_tokens, 0)} tokens of KV beside {states} states, and "
            f"the longest prompt with its answer takes {needed}: give at least {least:.0f} bytes (--device-size, "
            "--budget-factor), fewer --running, or a smaller --context"
        )
    if given.host <= given.inflight:
        raise TooSmall(
            f"{given.host} bytes of host memory are no more than the {given.inflight} in flight: raise --host-size or "
            "--budget-factor, or lower --inflight-size"
        )
    device = kv_tokens * units.kv_bytes_per_token + states * units.checkpoint_bytes
    return Budgets(kv_tokens, states, (given.host - given.inflight) / device, given.inflight, given.disk)


def start_only(model: str, work_dir: Path, chunk: int, inflight: int, extra: Sequence[str]) -> Setup:
    """Return a setup of HiState that is large enough to start, whatever a token of KV takes."""
    budgets = Budgets(2 * max(chunk, CHUNK), 32, 2.0, inflight, max(4 * inflight, 1 << 30))
    return Setup(model, chunk, budgets, work_dir, extra=tuple(extra))


def setup_of(
    system: System,
    budgets: Budgets,
    units: Units,
    *,
    model: str | None,
    work_dir: Path,
    running: int,
    chunk: int,
    scale: float,
    recorded: bool,
    extra: Sequence[str] = (),
) -> Setup:
    """Return how a system is started: the same pools, pages, batch and chunks for all.

    `chunk` is in tokens as sent, `scale` of them for a recorded one; a system with a tail has that many more for ends of prompts.
    Of HiState's one pool one state's bytes are where kernels write for padding rows; stock pools have that in addition
    to their size. So HiState is given one state more, and no more host memory for it.
    """
    kv = round(budgets.device_kv_tokens * units.kv_bytes_per_token)
    states = budgets.device_states * units.checkpoint_bytes
    host = round(budgets.host_ratio * (kv + states))
    reference = Holdings(
        device_kv=kv,
        device_states=states,
        host_arena=host,
        host_inflight=budgets.inflight_bytes,
        disk=budgets.disk_bytes,
    )
    if system.has_histate:
        more = budgets.device_states + 1
        ratio = host / (kv + more * units.checkpoint_bytes)
        budgets = replace(budgets, device_states=more, host_ratio=ratio)
    shared = (
        *("--max-running-requests", str(running)),
        "--enable-cache-report",
        *((SERVER_FLAG,) if recorded else ()),
    )
    tail = system.tail_at(scale)
    setup = Setup(model, chunk + tail, budgets, work_dir, reference, units)
    tailed = ("--histate-step-tail", str(tail)) if tail else ()
    return replace(setup, extra=(*shared, *system.flags_at(scale), *tailed, *extra))
