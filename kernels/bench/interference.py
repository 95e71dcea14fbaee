"""Step 4: what copies cost the computation beside them, and what they cost SGLang's own small copies.

Loads are a bf16 matrix product, a copy within device memory, and a decode-like graph of many small products. Beside each
runs one way of copying records to the host, without a pause or 8 records a second. Slowdown is against the same load
alone, measured before and after. For small copies (token ids, sampled tokens) the time of a 4 KiB copy on another stream
is taken: behind a large copy it waits for its engine.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import torch

from sglang_histate.config import CheckpointDtype

from .device import Table, quantile
from .scale import GROUP_LAYERS
from .steps import Bench

Way = Callable[[Any], None]  # copies one record on a stream and returns when it has arrived

STATES_PER_S = 8
SMALL_BYTES = 4096


def run(bench: Bench) -> None:
    ways = _ways(bench)
    _small_copies(bench, ways)
    for name, make in {"gemm": _gemm, "memory": _memory, "decode graph": _graph}.items():
        work = make(bench)
        _seconds(bench, work, 3)  # first calls load and choose
        repeats = max(3, int(bench.scale.load_s / max(_seconds(bench, work, 3) / 3, 1e-6)))
        _seconds(bench, work, repeats)  # until the clocks are where they stay
        before = _seconds(bench, work, repeats)
        for path, way in ways.items():
            for pace in ("continuous", "8 per second"):
                try:
                    with _running(bench, way, pace) as copied:
                        beside = _seconds(bench, work, repeats)
                except RuntimeError as error:
                    bench.row(what="slowdown", load=name, path=path, pace=pace, error=str(error)[:300])
                    continue
                after = _seconds(bench, work, repeats)
                alone = (before + after) / 2
                bench.row(
                    what="slowdown",
                    load=name,
                    path=path,
                    pace=pace,
                    alone_ms=round(alone / repeats * 1e3, 5),
                    beside_ms=round(beside / repeats * 1e3, 5),
                    slowdown_percent=round((beside / alone - 1) * 100, 3),
                    noise_percent=round(abs(after / before - 1) * 100, 3),
                    records_copied=copied(),
                )
                before = after


def _ways(bench: Bench) -> dict[str, Way]:
    device, states = bench.device, bench.states
    record = device.pinned(states.record_bytes).view(1, -1)
    whole = states.tables(range(1), record, to_host=True)
    groups = states.tables(range(1), record, to_host=True, group=GROUP_LAYERS)

    def by_engine(tables: list[Table]) -> Way:
        def way(stream: Any) -> None:
            flying: deque = deque()
            for table in tables:  # at most two in flight, so that others get between them
                if len(flying) == 2:
                    _wait(flying.popleft())
                device.copy(table, batch=True, stream=stream)
                flying.append(_mark(bench, stream))
            for mark in flying:
                _wait(mark)

        return way

    def by_pack(encoding: CheckpointDtype) -> Way:
        packed = torch.empty((1, states.size_of(encoding)), dtype=torch.uint8, device=device.torch)
        flags = torch.zeros(1, dtype=torch.int32, device=device.torch)
        table = Table([(record.data_ptr(), packed.data_ptr(), packed.numel())])

        def way(stream: Any) -> None:
            with device.on(stream):
                device.kernels.pack(states.pool, [0], packed, encoding, flags=flags)
                device.copy(table, batch=False, stream=stream)
            _wait(_mark(bench, stream))

        return way

    def in_place(stream: Any) -> None:
        with device.on(stream):
            device.kernels.pack(states.pool, [0], record, CheckpointDtype.NATIVE, most_blocks=4)
        _wait(_mark(bench, stream))

    return {
        "A1 batch": by_engine(whole),
        "A2 groups": by_engine(groups),
        "A3 pack native": by_pack(CheckpointDtype.NATIVE),
        "A3 pack int8": by_pack(CheckpointDtype.INT8),
        "A4 in place, 4 blocks": in_place,
    }


@contextmanager
def _running(bench: Bench, way: Way, pace: str) -> Iterator[Callable[[], int]]:
    """Copy records in a thread with a stream of its own while the block runs; yields how many there were."""
    device = bench.device
    stop, count, errors = threading.Event(), [0], []
    stream = device.new_stream()

    def copies() -> None:
        try:
            if not device.dry_run:
                torch.cuda.set_device(device.torch)
            begin = perf_counter()
            while not stop.is_set():
                way(stream)
                count[0] += 1
                if pace != "continuous":
                    stop.wait(max(0.0, begin + count[0] / STATES_PER_S - perf_counter()))
        except RuntimeError as error:
            errors.append(error)

    device.synchronize()
    thread = threading.Thread(target=copies, daemon=True)
    thread.start()
    sleep(0.02)
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
        device.synchronize()
    if errors:
        raise errors[0]


def _mark(bench: Bench, stream: Any) -> Any:
    if bench.device.dry_run:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _wait(mark: Any) -> None:
    if mark is not None:
        mark.synchronize()


def _seconds(bench: Bench, work: Callable[[], None], repeats: int) -> float:
    """Return how long `repeats` runs take, queued at once."""
    device = bench.device
    device.synchronize()
    with device.on(device.stream):
        begin, end = device.event(), device.event()
        start = perf_counter()
        device.record(begin, device.stream)
        for _ in range(repeats):
            work()
        device.record(end, device.stream)
    if end is None:
        return perf_counter() - start
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _gemm(bench: Bench) -> Callable[[], None]:
    n = bench.scale.matrix
    a, b = (bench.device.random(n, n, dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, b, out=out)

    return work


def _memory(bench: Bench) -> Callable[[], None]:
    source, target = (bench.device.bytes(bench.scale.memory_bytes) for _ in "ab")

    def work() -> None:
        target.copy_(source)

    return work


def _graph(bench: Bench) -> Callable[[], None]:
    """Return one step of 32 small products one after the other, as decode with a small batch has them."""
    width = bench.scale.graph_width
    weights = [
        bench.device.random(width, width, dtype=torch.bfloat16) for _ in range(bench.scale.graph_layers)
    ]
    state = bench.device.random(16, width, dtype=torch.bfloat16) * 0.01

    def step() -> None:
        x = state
        for weight in weights:
            x = torch.tanh(x @ weight)

    if bench.device.dry_run:
        return step
    bench.device.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _small_copies(bench: Bench, ways: dict[str, Way]) -> None:
    device = bench.device
    here, there = device.pinned(SMALL_BYTES), device.bytes(SMALL_BYTES)
    tables = {
        "h2d": Table([(there.data_ptr(), here.data_ptr(), SMALL_BYTES)]),
        "d2h": Table([(here.data_ptr(), there.data_ptr(), SMALL_BYTES)]),
    }

    def sample(table: Table) -> list[float]:
        took = []
        for _ in range(bench.scale.probes):
            start = perf_counter()
            device.copy(table, batch=False)
            if device.stream is not None:
                device.stream.synchronize()
            took.append((perf_counter() - start) * 1e3)
            sleep(0.0007)  # not in step with the copies beside it
        return took

    # Only captures run here, so it is d2h that shares an engine with them; restores do the same to h2d.
    for path, way in {"nothing": None, **ways}.items():
        for direction, table in tables.items():
            if way is None:
                took = sample(table)
            else:
                try:
                    with _running(bench, way, "continuous"):
                        took = sample(table)
                except RuntimeError as error:
                    bench.row(what="small_copy", way=direction, path=path, error=str(error)[:300])
                    continue
            bench.row(
                what="small_copy",
                way=direction,
                path=path,
                median_ms=round(statistics.median(took), 5),
                p95_ms=round(quantile(took, 0.95), 5),
                most_ms=round(max(took), 5),
            )
