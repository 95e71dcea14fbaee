"""Steps 2 and 3: records to the host and back, in every way that could become the default.

A0 loop      one cudaMemcpyAsync per piece            B0
A1 batch     one batch call for all records           B1
A2 groups    one batch call per 3 layers of a record  B2
A3 pack      pack, then one copy per record           B3 one copy per record, then unpack
A4 in place  pack writes pinned memory itself         B4 unpack reads pinned memory itself
A5 torch     index_select and copy_                   B5 copy_ and index_copy_
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sglang_histate.config import CheckpointDtype

from .device import Table
from .scale import GROUP_LAYERS
from .steps import Bench

NATIVE = CheckpointDtype.NATIVE


def to_host(bench: Bench) -> None:
    device, states, scale = bench.device, bench.states, bench.scale
    most = max(scale.counts)
    here = device.pinned(most * states.record_bytes).view(most, -1)
    staging = torch.empty_like(here, device=device.torch)
    device.kernels.pack(states.pool, range(most), staging, NATIVE)
    device.synchronize()
    wanted = staging.to("cpu", copy=True)
    for count in scale.counts:
        _to_host(bench, here[:count], staging[:count], wanted[:count])


def _to_host(bench: Bench, records: torch.Tensor, staging: torch.Tensor, wanted: torch.Tensor) -> None:
    device, pool, count = bench.device, bench.states.pool, len(records)
    slots = range(count)

    def poison() -> None:
        records.fill_(0xA5)

    def arrived() -> bool:
        # Copies by pieces leave the padding alone, of which these shapes have none.
        return torch.equal(records, wanted)

    for path, work in _engine_ways(bench, slots, records, down=True).items():
        _measure(bench, f"A{path}", count, records.numel(), work, poison, arrived)
    for encoding in CheckpointDtype:
        _packed(bench, records, staging, encoding)
    for blocks in bench.scale.blocks:
        in_place = partial(device.kernels.pack, pool, slots, records, NATIVE, most_blocks=blocks)
        _measure(bench, f"A4 in place, {blocks} blocks", count, records.numel(), in_place, poison, arrived)
    index = torch.arange(count, device=device.torch)
    temporal, conv = (_pinned_like(bench, each[:, :count]) for each in (pool.temporal, pool.conv))

    def by_torch() -> None:
        temporal.copy_(pool.temporal.index_select(1, index), non_blocking=True)
        conv.copy_(pool.conv.index_select(1, index), non_blocking=True)

    def same() -> bool:
        return torch.equal(temporal, pool.temporal[:, :count].cpu())

    _measure(bench, "A5 torch", count, records.numel(), by_torch, temporal.zero_, same)


def _packed(bench: Bench, records: torch.Tensor, staging: torch.Tensor, encoding: CheckpointDtype) -> None:
    """A3 in one encoding: the kernel alone, and with the copy behind it."""
    device, count = bench.device, len(records)
    size = bench.states.size_of(encoding)
    packed, arrived = staging[:, :size], records.view(-1)[: count * size].view(count, size)
    table = _rows(arrived, packed)
    pack = partial(device.kernels.pack, bench.states.pool, range(count), packed, encoding)

    def pack_and_copy() -> None:
        pack()
        device.copy(table, batch=False)

    def poison() -> None:
        arrived.fill_(0xA5)

    def same() -> bool:
        return torch.equal(arrived, packed.cpu())

    moved = count * (bench.states.record_bytes + size)
    times = device.time(pack)
    bench.row(what="pack", encoding=encoding.value, records=count, bytes=moved, **times.row(moved))
    _measure(bench, f"A3 pack {encoding.value}", count, count * size, pack_and_copy, poison, same)


def to_device(bench: Bench) -> None:
    device, states, scale = bench.device, bench.states, bench.scale
    half = scale.slots // 2
    counts = [count for count in scale.counts if count <= half]
    here = device.pinned(max(counts) * states.record_bytes).view(max(counts), -1)
    staging = torch.empty_like(here, device=device.torch)
    for count in counts:
        for encoding in CheckpointDtype:
            _unpacked(bench, here[:count], staging[:count], encoding)
        _stored(bench, here, staging, NATIVE)
        _to_device(bench, here[:count])
    _fan_out(bench, here, staging)


def _stored(bench: Bench, records: torch.Tensor, staging: torch.Tensor, encoding: CheckpointDtype) -> None:
    """Make the records of the first slots, as they would come from a disk."""
    bench.device.kernels.pack(bench.states.pool, range(len(records)), staging, encoding)
    bench.device.synchronize()
    records.copy_(staging)


def _to_device(bench: Bench, records: torch.Tensor) -> None:
    device, states, count = bench.device, bench.states, len(records)
    pool = states.pool
    half = bench.scale.slots // 2
    slots, sources = range(half, half + count), range(count)
    poison, check = partial(states.poison, slots), partial(states.same, slots, sources)
    payload = records.numel()
    for path, work in _engine_ways(bench, slots, records, down=False).items():
        _measure(bench, f"B{path}", count, payload, work, poison, check, what="h2d")
    for blocks in bench.scale.blocks:
        in_place = partial(device.kernels.unpack, records, slots, pool, None, NATIVE, most_blocks=blocks)
        _measure(bench, f"B4 in place, {blocks} blocks", count, payload, in_place, poison, check, what="h2d")
    index = torch.tensor(list(slots), device=device.torch)
    temporal, conv = (_pinned_like(bench, each[:, :count]) for each in (pool.temporal, pool.conv))
    temporal.copy_(pool.temporal[:, :count])
    conv.copy_(pool.conv[:, :count])

    def by_torch() -> None:
        pool.temporal.index_copy_(1, index, temporal.to(device.torch, non_blocking=True))
        pool.conv.index_copy_(1, index, conv.to(device.torch, non_blocking=True))

    _measure(bench, "B5 torch", count, payload, by_torch, poison, check, what="h2d")


def _unpacked(bench: Bench, records: torch.Tensor, staging: torch.Tensor, encoding: CheckpointDtype) -> None:
    """B3 in one encoding: the kernel alone, and behind the copy."""
    device, states, count = bench.device, bench.states, len(records)
    half = bench.scale.slots // 2
    slots, sources = range(half, half + count), range(count)
    size = states.size_of(encoding)
    packed, stored = staging[:, :size], records.view(-1)[: count * size].view(count, size)
    _stored(bench, stored, packed, encoding)
    table = _rows(packed, stored)
    unpack = partial(device.kernels.unpack, packed, slots, states.pool, None, encoding)

    def copy_and_unpack() -> None:
        device.copy(table, batch=False)
        unpack()

    def check() -> bool:
        exact = encoding is NATIVE
        return states.same(slots, sources) if exact else _close(states.pool.temporal, slots, sources)

    moved = count * (states.record_bytes + size)
    times = device.time(unpack)
    bench.row(what="unpack", encoding=encoding.value, records=count, bytes=moved, **times.row(moved))
    name, poison = f"B3 unpack {encoding.value}", partial(states.poison, slots)
    _measure(bench, name, count, count * size, copy_and_unpack, poison, check, what="h2d")


def _pinned_like(bench: Bench, tensor: torch.Tensor) -> torch.Tensor:
    pageable = torch.empty(tensor.shape, dtype=tensor.dtype)
    return pageable if bench.device.dry_run else pageable.pin_memory()


def _engine_ways(
    bench: Bench, slots: range, records: torch.Tensor, *, down: bool
) -> dict[str, Callable[[], None]]:
    device, states = bench.device, bench.states
    whole = states.tables(slots, records, to_host=down)
    groups = states.tables(slots, records, to_host=down, group=GROUP_LAYERS)

    def ways(tables: list[Table], batch: bool) -> Callable[[], None]:
        def work() -> None:
            for table in tables:
                device.copy(table, batch=batch)

        return work

    return {"0 loop": ways(whole, False), "1 batch": ways(whole, True), "2 groups": ways(groups, True)}


def _measure(
    bench: Bench,
    path: str,
    count: int,
    payload: int,
    work: Callable[[], object],
    poison: Callable[[], object],
    check: Callable[[], bool],
    what: str = "d2h",
) -> None:
    """One row: the times of `work`, and whether the right bytes arrive where poison was before."""
    try:
        times = bench.device.time(work)
        poison()
        bench.device.synchronize()
        with bench.device.on(bench.device.stream):
            work()
        bench.device.synchronize()
        bench.row(what=what, path=path, records=count, bytes=payload, ok=check(), **times.row(payload))
    except (RuntimeError, ValueError) as error:
        bench.row(what=what, path=path, records=count, bytes=payload, ok=False, error=str(error)[:300])


def _fan_out(bench: Bench, here: torch.Tensor, staging: torch.Tensor) -> None:
    """One record to four slots: by unpack, and by four times the copies."""
    device, states = bench.device, bench.states
    slots = range(bench.scale.slots - 4, bench.scale.slots)
    table = _rows(staging[:1], here[:1])
    tables = states.tables(slots, here[:1].expand(4, -1), to_host=False)
    poison = partial(states.poison, slots)

    def unpack() -> None:
        device.copy(table, batch=False)
        device.kernels.unpack(staging[:1], slots, states.pool, None, NATIVE)

    def copies() -> None:
        device.copy(tables[0], batch=True)

    def same() -> bool:
        return all(states.same(range(slot, slot + 1), range(1)) for slot in slots)

    for path, work in (("B3 unpack to 4", unpack), ("B1 batch to 4", copies)):
        _measure(bench, path, 1, states.record_bytes, work, poison, same, what="fan_out")


def _rows(to: torch.Tensor, source: torch.Tensor) -> Table:
    """Return one copy per row."""
    return Table([(a.data_ptr(), b.data_ptr(), a.numel()) for a, b in zip(to, source, strict=True)])


def _close(states: torch.Tensor, slots: range, sources: range) -> bool:
    got, wanted = states[:, list(slots)], states[:, list(sources)]
    return bool(((got - wanted).abs() <= wanted.abs().amax(dim=-2, keepdim=True) / 120).all())
