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
    wanted = torch.zeros_like(here, device=device.torch)
    device.kernels.pack(states.pool, range(most), wanted, NATIVE)
    device.synchronize()
    wanted_here = wanted.cpu()
    for count in scale.counts:
        slots, records = range(count), here[:count]
        payload = count * states.record_bytes

        def poison(records=records) -> None:
            records.fill_(0xA5)

        def arrived_whole(records=records) -> bool:
            # Copies by pieces leave the padding alone, of which these shapes have none.
            return torch.equal(records, wanted_here[: len(records)])

        for path, work in _engine_ways(bench, slots, records, down=True).items():
            _measure(bench, f"A{path}", count, payload, work, poison, arrived_whole)
        for encoding in CheckpointDtype:
            size = states.size_of(encoding)
            packed, arrived = staging[:count, :size], here.view(-1)[: count * size].view(count, size)
            table = _rows(arrived, packed)

            def pack(packed=packed, encoding=encoding, slots=slots, most_blocks=0) -> None:
                device.kernels.pack(states.pool, slots, packed, encoding, most_blocks=most_blocks)

            def pack_and_copy(pack=pack, table=table) -> None:
                pack()
                device.copy(table, batch=False)

            read = count * states.record_bytes + count * size
            name = f"A3 pack {encoding.value}"
            times = device.time(pack)
            bench.row(what="pack", encoding=encoding.value, records=count, bytes=read, **times.row(read))
            if encoding is NATIVE:
                _measure(bench, name, count, count * size, pack_and_copy, poison, arrived_whole)
            else:
                _measure(
                    bench,
                    name,
                    count,
                    count * size,
                    pack_and_copy,
                    lambda a=arrived: a.fill_(0xA5),
                    lambda a=arrived, p=packed: torch.equal(a, p.cpu()),
                )
        for blocks in scale.blocks:

            def in_place(records=records, slots=slots, blocks=blocks) -> None:
                device.kernels.pack(states.pool, slots, records, NATIVE, most_blocks=blocks)

            name = f"A4 in place, {blocks} blocks"
            _measure(bench, name, count, payload, in_place, poison, arrived_whole)
        index = torch.arange(count, device=device.torch)
        temporal, conv = (
            torch.empty_like(each[:, :count], device="cpu")
            for each in (states.pool.temporal, states.pool.conv)
        )
        if not device.dry_run:
            temporal, conv = temporal.pin_memory(), conv.pin_memory()

        def by_torch(temporal=temporal, conv=conv, index=index) -> None:
            temporal.copy_(states.pool.temporal.index_select(1, index), non_blocking=True)
            conv.copy_(states.pool.conv.index_select(1, index), non_blocking=True)

        _measure(
            bench,
            "A5 torch",
            count,
            payload,
            by_torch,
            lambda t=temporal: t.zero_(),
            lambda t=temporal, n=count: torch.equal(t, states.pool.temporal[:, :n].cpu()),
        )


def to_device(bench: Bench) -> None:
    device, states, scale = bench.device, bench.states, bench.scale
    most = max(scale.counts)
    staging = torch.zeros((most, states.record_bytes), dtype=torch.uint8, device=device.torch)
    here = device.pinned(most * states.record_bytes).view(most, -1)
    device.kernels.pack(states.pool, range(most), staging, NATIVE)
    device.synchronize()
    here.copy_(staging)
    half = scale.slots // 2
    for count in (count for count in scale.counts if count <= half):
        slots, sources, records = range(half, half + count), range(count), here[:count]
        payload = count * states.record_bytes

        def poison(slots=slots) -> None:
            states.poison(slots)

        def check(slots=slots, sources=sources) -> bool:
            return states.same(slots, sources)

        for path, work in _engine_ways(bench, slots, records, down=False).items():
            _measure(bench, f"B{path}", count, payload, work, poison, check, what="h2d")
        for encoding in CheckpointDtype:
            size = states.size_of(encoding)
            packed, stored = staging[:count, :size], here.view(-1)[: count * size].view(count, size)
            device.kernels.pack(states.pool, sources, packed, encoding)
            device.synchronize()
            stored.copy_(packed)
            table = _rows(packed, stored)

            def unpack(packed=packed, encoding=encoding, slots=slots) -> None:
                device.kernels.unpack(packed, slots, states.pool, None, encoding)

            def copy_and_unpack(unpack=unpack, table=table) -> None:
                device.copy(table, batch=False)
                unpack()

            moved = count * (states.record_bytes + size)
            bench.row(
                what="unpack",
                encoding=encoding.value,
                records=count,
                bytes=moved,
                **device.time(unpack).row(moved),
            )
            close = (
                check if encoding is NATIVE else lambda s=slots, o=sources: _close(states.pool.temporal, s, o)
            )
            _measure(
                bench,
                f"B3 unpack {encoding.value}",
                count,
                count * size,
                copy_and_unpack,
                poison,
                close,
                what="h2d",
            )
        device.kernels.pack(states.pool, range(most), staging, NATIVE)
        device.synchronize()
        here.copy_(staging)
        for blocks in scale.blocks:

            def in_place(records=records, slots=slots, blocks=blocks) -> None:
                device.kernels.unpack(records, slots, states.pool, None, NATIVE, most_blocks=blocks)

            _measure(
                bench, f"B4 in place, {blocks} blocks", count, payload, in_place, poison, check, what="h2d"
            )
        _torch_way(bench, slots, sources, poison, check)
    _fan_out(bench, here, staging)


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
    work: Callable[[], None],
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


def _torch_way(
    bench: Bench, slots: range, sources: range, poison: Callable[[], None], check: Callable[[], bool]
) -> None:
    pool, device = bench.states.pool, bench.device
    index = torch.tensor(list(slots), device=device.torch)
    temporal, conv = (each[:, list(sources)].cpu() for each in (pool.temporal, pool.conv))
    if not device.dry_run:
        temporal, conv = temporal.pin_memory(), conv.pin_memory()

    def work() -> None:
        pool.temporal.index_copy_(1, index, temporal.to(device.torch, non_blocking=True))
        pool.conv.index_copy_(1, index, conv.to(device.torch, non_blocking=True))

    payload = len(slots) * bench.states.record_bytes
    _measure(bench, "B5 torch", len(slots), payload, work, poison, check, what="h2d")


def _fan_out(bench: Bench, here: torch.Tensor, staging: torch.Tensor) -> None:
    """One record to four slots: by unpack, and by four times the copies."""
    device, states = bench.device, bench.states
    slots = range(bench.scale.slots - 4, bench.scale.slots)
    table = _rows(staging[:1], here[:1])
    tables = states.tables(slots, here[:1].expand(4, -1), to_host=False)

    def unpack() -> None:
        device.copy(table, batch=False)
        device.kernels.unpack(staging[:1], slots, states.pool, None, NATIVE)

    def copies() -> None:
        device.copy(tables[0], batch=True)

    def same() -> bool:
        return all(states.same(range(slot, slot + 1), range(1)) for slot in slots)

    for path, work in (("B3 unpack to 4", unpack), ("B1 batch to 4", copies)):
        _measure(
            bench, path, 1, states.record_bytes, work, lambda: states.poison(slots), same, what="fan_out"
        )


def _rows(to: torch.Tensor, source: torch.Tensor) -> Table:
    """Return one copy per row."""
    return Table([(a.data_ptr(), b.data_ptr(), a.numel()) for a, b in zip(to, source, strict=True)])


def _close(states: torch.Tensor, slots: range, sources: range) -> bool:
    got, wanted = states[:, list(slots)], states[:, list(sources)]
    return bool(((got - wanted).abs() <= wanted.abs().amax(dim=-2, keepdim=True) / 120).all())
