"""The GPU as the bench sees it, or the CPU in its place in a dry run: streams, times, pinned memory, copies by table."""

from __future__ import annotations

import ctypes
import mmap
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..native import NativeKernels

ATTRIBUTES = (
    *("host_register_supported", "can_use_host_pointer_for_registered_memory", "pageable_memory_access"),
    *("async_engines", "multiprocessors", "l2_bytes"),
)
COPIES = Path(__file__).resolve().parent / "copies.cu"
NOT_SUPPORTED = 801  # cudaErrorNotSupported
LEAD_CYCLES = 3_000_000  # 1.5 to 2 ms


@dataclass(frozen=True)
class Times:
    """Of repeated runs, in milliseconds. `cpu_ms` is what submitting took."""

    median_ms: float
    p95_ms: float
    cpu_ms: float

    def row(self, size_bytes: int) -> dict[str, float]:
        """Return the figures of a measurement that moves so many bytes."""
        return {
            "median_ms": round(self.median_ms, 5),
            "p95_ms": round(self.p95_ms, 5),
            "cpu_ms": round(self.cpu_ms, 5),
            "gb_s": round(size_bytes / max(self.median_ms, 1e-6) / 1e6, 3),
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


class Device:
    """Work goes to `stream`, never to the default stream: the batch call refuses that one."""

    def __init__(self, library: Path, *, dry_run: bool, repeats: int, warmups: int) -> None:
        self.dry_run = dry_run
        self.repeats = repeats
        self.warmups = warmups
        self.torch = torch.device("cpu") if dry_run else torch.device("cuda", torch.cuda.current_device())
        self.kernels = NativeKernels(library)
        self.stream = self.new_stream()
        self._library: Any = self.kernels.library
        table = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        for name in ("bench_loop", "bench_batch"):
            getattr(self._library, name).argtypes = [*table, ctypes.c_void_p]
        self._library.bench_pinned.argtypes, self._library.bench_pinned.restype = (
            [ctypes.c_size_t],
            ctypes.c_void_p,
        )
        self._library.bench_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.bench_unregister.argtypes = [ctypes.c_void_p]

    def new_stream(self, priority: int = 0) -> Any:
        return None if self.dry_run else torch.cuda.Stream(self.torch, priority=priority)

    def on(self, stream: Any) -> Any:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize(self.torch)

    def attributes(self) -> dict[str, int]:
        index = self.torch.index or 0
        return {name: self._library.bench_attribute(i, index) for i, name in enumerate(ATTRIBUTES)}

    def time(self, work: Callable[[], object], repeats: int | None = None) -> Times:
        """Run `work` on `stream` again and again; each run is timed by events and waited for.

        The GPU is kept busy until all is queued, so the time is its own: short kernels would else be measured together
        with the Python in front of them. That is `cpu_ms`.
        """
        took, cpu = [], []
        self.synchronize()  # what was prepared on another stream
        with self.on(self.stream):
            for index in range(self.warmups + (repeats or self.repeats)):
                begin, end = self.event(), self.event()
                if not self.dry_run:
                    torch.cuda._sleep(LEAD_CYCLES)
                start = perf_counter()
                self.record(begin, self.stream)
                work()
                self.record(end, self.stream)
                submitted = perf_counter() - start
                self.synchronize()
                elapsed = perf_counter() - start if self.dry_run else begin.elapsed_time(end) / 1e3
                if index >= self.warmups:
                    took.append(elapsed * 1e3)
                    cpu.append(submitted * 1e3)
        return Times(statistics.median(took), quantile(took, 0.95), statistics.median(cpu))

    def event(self) -> Any:
        return None if self.dry_run else torch.cuda.Event(enable_timing=True)

    def record(self, event: Any, stream: Any) -> None:
        if event is not None:
            event.record(stream)

    # Memory.

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.torch, dtype=torch.float32).to(dtype)

    def bytes(self, size: int) -> torch.Tensor:
        """Return random bytes on the device: zeros and patterns may be copied faster than real data."""
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.torch)

    def pinned(self, size: int) -> torch.Tensor:
        """Return `size` poisoned bytes from cudaHostAlloc. They live as long as the process."""
        address = self._library.bench_pinned(size)
        if not address:
            raise MemoryError(f"no {size} bytes of pinned memory")
        memory = (ctypes.c_uint8 * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).fill_(0xA5)

    def registered(self, size: int) -> torch.Tensor:
        """Return `size` poisoned bytes of mmap that are registered with CUDA. They live as long as the process."""
        memory = mmap.mmap(-1, size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(0xA5)
        code = self._library.bench_register(tensor.data_ptr(), size)
        if code:
            raise MemoryError(f"{size} bytes could not be registered (cudaError {code})")
        return tensor

    def registered_pointer_usable(self, tensor: torch.Tensor) -> str:
        """Return why the copy engine cannot take `tensor`'s memory by its host address, nothing if it can."""
        there = self.bytes(tensor.numel())
        table = Table([(there.data_ptr(), tensor.data_ptr(), tensor.numel())])
        try:
            self.copy(table, batch=True)
            self.synchronize()
        except RuntimeError as error:
            return str(error)
        return "" if torch.equal(there.cpu(), tensor) else "other bytes arrived"

    # Copies.

    def copy(self, table: Table, *, batch: bool, stream: Any = None, cpu_us: Any = None) -> None:
        """Queue the copies of `table` on a stream, the bench's own by default.

        Raises:
            RuntimeError: CUDA refused them.
        """
        call = self._library.bench_batch if batch else self._library.bench_loop
        on = stream or self.stream
        handle = None if on is None else on.cuda_stream
        code = call(table.to, table.source, table.sizes, table.count, handle, cpu_us)
        if code == NOT_SUPPORTED:
            raise RuntimeError("this CUDA runtime has no cudaMemcpyBatchAsync")
        if code:
            raise RuntimeError(f"cudaError {code} from {'the batch call' if batch else 'cudaMemcpyAsync'}")


class Table:
    """Copies as arrays of addresses and sizes, as CUDA takes them. The memory must outlive it."""

    def __init__(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """`copies` are (destination, source, bytes)."""
        self.count = len(copies)
        self.to = (ctypes.c_void_p * self.count)(*(copy[0] for copy in copies))
        self.source = (ctypes.c_void_p * self.count)(*(copy[1] for copy in copies))
        self.sizes = (ctypes.c_size_t * self.count)(*(copy[2] for copy in copies))
        self.bytes = sum(copy[2] for copy in copies)
