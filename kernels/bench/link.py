"""Step 1: the ceiling of the copy engines, each way and both at once, with both kinds of pinned memory; and of HBM."""

from __future__ import annotations

from functools import partial

import torch

from .device import Table, Times
from .steps import Bench


def run(bench: Bench) -> None:
    device, sizes = bench.device, bench.scale.link_sizes
    there, other = device.bytes(sizes[-1]), device.bytes(sizes[-1])
    for memory in ("allocated", "registered"):
        try:
            make = device.pinned if memory == "allocated" else device.registered
            here, back = make(sizes[-1]), make(sizes[-1])
        except MemoryError as error:
            bench.row(what="link", memory=memory, error=str(error))
            continue
        if memory == "registered":
            refused = device.registered_pointer_usable(here)
            bench.row(what="registered_memory", ok=not refused, reason=refused)
            if refused:
                continue
        for size in sizes:
            down = Table([(here.data_ptr(), there.data_ptr(), size)])
            up = Table([(other.data_ptr(), back.data_ptr(), size)])
            for way, table in (("d2h", down), ("h2d", up)):
                times = device.time(partial(device.copy, table, batch=False))
                bench.row(what="link", memory=memory, way=way, bytes=size, **times.row(size))
            bench.row(
                what="link", memory=memory, way="both", bytes=size, **_both(bench, down, up).row(2 * size)
            )
        device.synchronize()
        ok = torch.equal(here, there.cpu()) and torch.equal(back, other.cpu())
        bench.row(what="link_bytes", memory=memory, ok=ok)
    source, target = device.bytes(bench.scale.memory_bytes), device.bytes(bench.scale.memory_bytes)
    times = device.time(partial(target.copy_, source))
    bench.row(what="hbm", bytes=source.numel(), **times.row(2 * source.numel()))  # read and written


def _both(bench: Bench, down: Table, up: Table) -> Times:
    device = bench.device
    second = device.new_stream()

    def work() -> None:
        if second is not None:
            second.wait_stream(device.stream)
        device.copy(up, batch=False, stream=second)
        device.copy(down, batch=False)
        if second is not None:
            device.stream.wait_stream(second)

    return device.time(work)
