"""Step 5: the batch call for pages of every size: from which fragment on it serves for KV, and what it costs the CPU."""

from __future__ import annotations

import ctypes
import statistics
from functools import partial
from time import perf_counter

import torch

from .device import Table
from .steps import Bench


def run(bench: Bench) -> None:
    device, scale = bench.device, bench.scale
    largest = max(scale.fragments) * max(scale.fragment_counts)
    here, there = device.pinned(largest), device.bytes(largest)
    for size in scale.fragments:
        for count in scale.fragment_counts:
            # Every second piece of the device's memory, in an order that is not its own.
            order = torch.randperm(count, generator=torch.Generator().manual_seed(size + count)).tolist()
            pieces = [
                (here.data_ptr() + i * size, there.data_ptr() + place * size, size)
                for i, place in enumerate(order)
            ]
            for way in ("h2d", "d2h"):
                table = Table([(b, a, n) if way == "h2d" else (a, b, n) for a, b, n in pieces])
                try:
                    times = device.time(partial(device.copy, table, batch=True), scale.fragment_repeats)
                except RuntimeError as error:
                    bench.row(what="fragments", way=way, bytes=size, count=count, error=str(error))
                    continue
                inside = ctypes.c_double()
                in_c, in_python = [], []
                for _ in range(scale.fragment_repeats):
                    start = perf_counter()
                    built = Table(pieces)
                    in_python.append((perf_counter() - start) * 1e6)
                    device.copy(table, batch=True, cpu_us=ctypes.byref(inside))
                    device.synchronize()
                    in_c.append(inside.value)
                bench.row(
                    what="fragments",
                    way=way,
                    bytes=size,
                    count=count,
                    call_us=round(statistics.median(in_c), 2),
                    table_us=round(statistics.median(in_python), 2),
                    **times.row(built.bytes),
                )
