"""Step 6: records from a file: may O_DIRECT write into pinned memory, and what is gained by copying group by group.

The disk here may be slow or virtual, so the figures that count are the ratios.
"""

from __future__ import annotations

import mmap
import os
import statistics
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import torch

from .device import Table
from .scale import GROUP_LAYERS
from .steps import Bench

BLOCK = 4096


def _checksum() -> Callable[[memoryview], int]:
    """Return what the store verifies with, or something slower on a bare machine."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return zlib.crc32
    return xxh3_64_intdigest


checksum = _checksum()


def run(bench: Bench) -> None:
    states, scale = bench.states, bench.scale
    size = -(-states.record_bytes // BLOCK) * BLOCK
    path = bench.folder / f"bench-{os.getpid()}.records"
    try:
        _write(path, size, scale.disk_records)
        for memory in ("registered", "allocated"):
            _from_file(bench, path, size, memory)
    except OSError as error:
        bench.row(what="disk", error=f"{path.parent}: {error.strerror}")
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int, count: int) -> None:
    with path.open("wb") as file:
        for _ in range(count):
            file.write(os.urandom(size))
        os.fsync(file.fileno())


def _from_file(bench: Bench, path: Path, size: int, memory: str) -> None:
    device, states = bench.device, bench.states
    try:
        buffer = device.registered(size) if memory == "registered" else device.pinned(size)
    except MemoryError as error:
        bench.row(what="disk", memory=memory, error=str(error))
        return
    there = torch.empty(size, dtype=torch.uint8, device=device.torch)
    view = memoryview(buffer.numpy().data)
    file, direct = _open(path)
    try:
        refused = _refusal(file, view, direct)
        bench.row(what="direct_io", memory=memory, direct=direct, ok=not refused, reason=refused)
        if refused:
            os.close(file)
            file, direct = os.open(path, os.O_RDONLY), False
        step = -(-GROUP_LAYERS * states.form.segment_bytes // BLOCK) * BLOCK
        cuts = [(start, min(start + step, size)) for start in range(0, size, step)]
        ways: dict[str, Callable[[int], None]] = {
            "read": lambda at: _read(file, view, at, 0, size),
            "serial": lambda at: _serial(bench, file, buffer, there, at, cuts),
            "pipelined": lambda at: _pipelined(bench, file, buffer, there, at, cuts),
        }
        for name, work in ways.items():
            took = []
            for index in range(bench.scale.disk_records):
                if not direct:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                start = perf_counter()
                work(index * size)
                took.append((perf_counter() - start) * 1e3)
            ok = True
            if name != "read":
                ok = torch.equal(there.cpu(), buffer)
            median = statistics.median(took)
            bench.row(
                what="disk",
                memory=memory,
                way=name,
                direct=direct,
                checksum=checksum.__name__,
                bytes=size,
                ok=ok,
                median_ms=round(median, 3),
                gb_s=round(size / median / 1e6, 3),
            )
    finally:
        os.close(file)


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY), False


def _refusal(file: int, view: memoryview, direct: bool) -> str:
    """Return why a read into this memory fails, nothing if it does not."""
    try:
        _read(file, view, 0, 0, mmap.PAGESIZE)
    except OSError as error:
        return error.strerror or str(error)
    return "" if direct else "the file system takes no O_DIRECT"


def _read(file: int, view: memoryview, at: int, start: int, end: int) -> None:
    while start < end:
        got = os.preadv(file, [view[start:end]], at + start)
        if got == 0:
            raise OSError(0, "the file is too short")
        start += got


def _copy(bench: Bench, buffer: torch.Tensor, there: torch.Tensor, start: int, end: int) -> None:
    table = Table([(there.data_ptr() + start, buffer.data_ptr() + start, end - start)])
    bench.device.copy(table, batch=False)


def _serial(bench: Bench, file: int, buffer: torch.Tensor, there: torch.Tensor, at: int, cuts: list) -> None:
    view = memoryview(buffer.numpy().data)
    _read(file, view, at, 0, len(view))
    for start, end in cuts:
        checksum(view[start:end])
    _copy(bench, buffer, there, 0, len(view))
    bench.device.synchronize()


def _pipelined(
    bench: Bench, file: int, buffer: torch.Tensor, there: torch.Tensor, at: int, cuts: list
) -> None:
    """Each group is read by a thread, then verified and copied while the next one is read."""
    view = memoryview(buffer.numpy().data)
    with ThreadPoolExecutor(1) as reader:
        reads = [reader.submit(_read, file, view, at, start, end) for start, end in cuts]
        for read, (start, end) in zip(reads, cuts, strict=True):
            read.result()
            checksum(view[start:end])
            _copy(bench, buffer, there, start, end)
    bench.device.synchronize()
