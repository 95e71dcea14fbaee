"""What a machine holds of a model's KV and checkpoints, how densely they will be captured, and the flags for it.

Sizes are totals over all ranks unless they are said to be of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_histate.cli.size.bytes import Sizes
from sglang_histate.cli.size.errors import SizeError
from sglang_histate.policy.interval import DEFAULT_INTERVALS, NO_INTERVAL, choose_interval
from sglang_histate.policy.residence import MAX_PRESSURE, MIN_PRESSURE
from sglang_histate.sizes import format_size
from sglang_histate.store.layout import SUPERBLOCK_BYTES

SEGMENTS = (2048, 8192, 32768)
PRESSURES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
_MIN_RECORDS = 4  # as the server's
_READS_AT_ONCE = 8  # records in flight beside those that one prefill chunk captures
_INFLIGHT_STEP = 64 << 20


@dataclass(frozen=True)
class Machine:
    """`device_bytes` is the memory of one GPU; host and SSD are the server's, over all its ranks."""

    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    memory_fraction: float
    chunk_tokens: int


@dataclass(frozen=True)
class Tier:
    """Bytes for prefixes, and what fits: tokens of KV alone, checkpoints alone, whole sessions with one checkpoint."""

    name: str
    size_bytes: int
    kv_tokens: int
    checkpoints: int
    sessions: int


@dataclass(frozen=True)
class Expected:
    """Of a segment: its interval and the pressure at which the two agree, see `expected_interval`."""

    segment_tokens: int
    interval: int
    pressure: float


@dataclass(frozen=True)
class Plan:
    """`inflight_bytes` and `ssd_bytes` are of one rank, as their flags are."""

    tiers: tuple[Tier, ...]
    inflight_bytes: int
    ssd_bytes: int
    expected: tuple[Expected, ...]

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.name == name)


def plan(machine: Machine, sizes: Sizes, weight_bytes: int, session_tokens: int) -> Plan:
    """Fill the tiers.

    Raises:
        SizeError: a tier holds nothing of use.
    """
    device = int(machine.device_bytes * machine.memory_fraction) - weight_bytes // sizes.ranks
    least = sizes.page_bytes + sizes.checkpoint_bytes
    if device < least:
        raise SizeError(
            f"--device {format_size(machine.device_bytes)}: after the weights ({format_size(weight_bytes // sizes.ranks)} per "
            f"rank) no page of KV and no state fit into {machine.memory_fraction:g} of it: use larger or more GPUs (--tp)"
        )
    ssd = machine.ssd_bytes // sizes.ranks
    slabs = max(0, ssd - SUPERBLOCK_BYTES) // sizes.slab_bytes
    if not slabs:
        raise SizeError(
            f"--ssd {format_size(machine.ssd_bytes)} holds no checkpoint: one takes {format_size(sizes.slab_bytes)} on each "
            f"of {sizes.ranks} ranks"
        )
    host_share = machine.host_bytes // sizes.ranks
    inflight = _inflight_bytes(machine, sizes, host_share)
    buffers = min(inflight // sizes.slab_bytes, ssd // sizes.slab_bytes + _MIN_RECORDS)
    pages = (host_share - buffers * sizes.slab_bytes) // sizes.page_bytes
    if pages < 1 + sizes.state_image_pages:
        raise SizeError(
            f"--host {format_size(machine.host_bytes)} is too small: each of {sizes.ranks} ranks needs "
            f"{format_size(inflight)} for checkpoints in flight and room for a page of KV and a checkpoint"
        )
    tiers = (
        _tier("device", device, device, sizes, session_tokens),
        _tier("host", pages * sizes.page_bytes, pages * sizes.page_bytes, sizes, session_tokens),
        _ssd(slabs, sizes, session_tokens),
    )
    fast_tokens = tiers[0].kv_tokens + tiers[1].kv_tokens
    expected = tuple(
        expected_interval(length, sizes.checkpoint_tokens, fast_tokens, slabs) for length in SEGMENTS
    )
    return Plan(tiers, inflight, ssd, expected)


def expected_interval(segment: int, state_tokens: float, kv_tokens: int, checkpoints: int) -> Expected:
    """Return the interval of a segment once all tiers are full, with the pressure that it makes itself.

    New tokens come at some rate. KV of as many tokens as device and host hold stays for that long; checkpoints of
    `checkpoints` intervals stay as long as so many intervals take. So pressure = kv_tokens / (checkpoints x interval), and
    a narrower interval raises it: the narrowest one that is chosen under the pressure it makes is the answer. The rate has
    no part in it. KV that spills to the SSD is left out, and so are repeated prompts.
    """
    pressure = MIN_PRESSURE
    for interval in DEFAULT_INTERVALS:
        if interval == NO_INTERVAL:
            break
        pressure = min(max(kv_tokens / (checkpoints * interval), MIN_PRESSURE), MAX_PRESSURE)
        chosen = choose_interval(segment, DEFAULT_INTERVALS, state_tokens, pressure)
        if chosen != NO_INTERVAL and chosen <= interval:
            return Expected(segment, interval, pressure)
    return Expected(segment, NO_INTERVAL, pressure)


def intervals(segment: int, state_tokens: float) -> dict[float, int]:
    """Return the interval of a segment by pressure."""
    return {
        pressure: choose_interval(segment, DEFAULT_INTERVALS, state_tokens, pressure)
        for pressure in PRESSURES
    }


def _tier(name: str, rank_bytes: int, room: int, sizes: Sizes, session_tokens: int) -> Tier:
    pages = room // sizes.page_bytes
    session = -(-session_tokens // sizes.page_tokens) + sizes.state_image_pages
    return Tier(
        name,
        rank_bytes * sizes.ranks,
        pages * sizes.page_tokens,
        pages // sizes.state_image_pages if name == "host" else room // sizes.checkpoint_bytes,
        pages // session,
    )


def _ssd(slabs: int, sizes: Sizes, session_tokens: int) -> Tier:
    in_slab = sizes.kv_pages_per_slab * sizes.page_tokens
    return Tier(
        "ssd",
        slabs * sizes.slab_bytes * sizes.ranks,
        slabs * in_slab,
        slabs,
        slabs // (1 + -(-session_tokens // in_slab)),
    )


def _inflight_bytes(machine: Machine, sizes: Sizes, host_share: int) -> int:
    """Return what one prefill chunk captures at the narrowest interval it would get, and some reads, up to a quarter.

    Raises:
        SizeError: a quarter is less than a server starts with.
    """
    narrowest = choose_interval(
        machine.chunk_tokens, DEFAULT_INTERVALS, sizes.checkpoint_tokens, MIN_PRESSURE
    )
    captures = 1 + (machine.chunk_tokens // narrowest if narrowest else 0)
    wanted = max((captures + _READS_AT_ONCE) * sizes.slab_bytes, _MIN_RECORDS * sizes.slab_bytes)
    wanted = -(-wanted // _INFLIGHT_STEP) * _INFLIGHT_STEP
    given = min(wanted, host_share // 4)
    if given < _MIN_RECORDS * sizes.slab_bytes:
        raise SizeError(
            f"--host {format_size(machine.host_bytes)} is too small: each of {sizes.ranks} ranks needs at least "
            f"{format_size(4 * _MIN_RECORDS * sizes.slab_bytes)}"
        )
    return given
