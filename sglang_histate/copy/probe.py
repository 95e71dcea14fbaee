"""Which engine a device gets: the first one that moves bytes there and back, tried once at start.

A driver may take a call and still not be able to carry it out: some devices fault on memory that was registered instead
of allocated by the driver. So each engine copies scattered pieces both ways, through registered memory as the server
has it, and the bytes are compared.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_histate.copy.cpu_engine import HostEngine
from sglang_histate.copy.cuda_engine import BatchEngine, CudaDriver, LoopEngine
from sglang_histate.copy.engine import CopyEngine
from sglang_histate.copy.plan import CopyPlan
from sglang_histate.copy.torch_engine import TorchEngine
from sglang_histate.copy.transfer import Space, Transfer

PIECE_BYTES = 64 << 10
PIECES = 8


@dataclass(frozen=True)
class Chosen:
    """The engine of a device. `rejected`: those before it by name, and why not."""

    engine: CopyEngine
    rejected: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.engine.name, "fallback": self.engine.fallback, "rejected": dict(self.rejected)}


def choose_engine(device: torch.device) -> Chosen:
    """Return what moves bytes between `device` and the host. Waits for the device: for the start, not for later."""
    if device.type != "cuda":
        return Chosen(host_engine(), {})
    found = candidates(device)
    return first_that_works(found, lambda engine: try_on_cuda(engine, device))


def host_engine() -> CopyEngine:
    """Return what moves bytes between two places of host memory, on any thread."""
    return HostEngine()


def candidates(device: torch.device) -> list[tuple[str, Callable[[], CopyEngine]]]:
    """Return the engines for CUDA by name, the best one first."""

    def driver() -> CudaDriver:
        from cuda.bindings import runtime  # type: ignore[import-not-found]

        return CudaDriver(runtime)

    def batch() -> CopyEngine:
        from cuda.bindings import runtime

        wanted = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        code, usable = runtime.cudaDeviceGetAttribute(wanted, device.index or 0)
        if int(code) != 0 or not usable:
            raise RuntimeError("the device cannot use host pointers of registered memory")
        return BatchEngine(driver())

    return [
        (BatchEngine.name, batch),
        (LoopEngine.name, lambda: LoopEngine(driver())),
        ("torch", TorchEngine),
    ]


def first_that_works(
    found: Sequence[tuple[str, Callable[[], CopyEngine]]], attempt: Callable[[CopyEngine], str | None]
) -> Chosen:
    """Return the first engine that can be made and for which `attempt` finds nothing wrong.

    Raises:
        RuntimeError: none works; it says why for each.
    """
    rejected: dict[str, str] = {}
    for name, make in found:
        try:
            engine = make()
            wrong = attempt(engine) or engine.fallback
        except Exception as error:  # whatever it is, the next one is tried and this is reported
            wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
        if wrong is None:
            return Chosen(engine, rejected)
        rejected[name] = wrong
    raise RuntimeError(
        "nothing can copy between this device and the host: "
        + "; ".join(f"{k}: {v}" for k, v in rejected.items())
    )


def try_on_cuda(engine: CopyEngine, device: torch.device) -> str | None:
    """Copy scattered pieces to the device and back through registered memory; return what is wrong, None if nothing."""
    size = PIECES * PIECE_BYTES
    memory = np.frombuffer(
        mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8
    )
    runtime = torch.cuda.cudart()
    pinned = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            on_device = torch.zeros(size, dtype=torch.uint8, device=device)
            host = Space("the probe's host memory", torch.from_numpy(memory), pinned)
            wrong = round_trip(
                engine, host, Space("the probe's device memory", on_device), stream.synchronize
            )
    finally:
        torch.cuda.synchronize(device)
        if pinned:
            runtime.cudaHostUnregister(memory.ctypes.data)
    return wrong


def round_trip(engine: CopyEngine, host: Space, device: Space, wait: Callable[[], None]) -> str | None:
    """Copy the first half of `host` to `device` in another order and from there to the second half; compare."""
    size = PIECES * PIECE_BYTES
    generator = torch.Generator().manual_seed(1)
    host.flat[:size] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    host.flat[size:] = 0
    straight = np.arange(PIECES, dtype=np.int64) * PIECE_BYTES
    mixed = straight[::-1].copy()
    engine.submit([Transfer(CopyPlan.blocks(straight, mixed, PIECE_BYTES), host, device)])
    engine.submit([Transfer(CopyPlan.blocks(straight, size + straight, PIECE_BYTES), device, host)])
    wait()
    there = host.flat[:size].view(PIECES, PIECE_BYTES).flip(0)
    if torch.equal(there, host.flat[size : 2 * size].view(PIECES, PIECE_BYTES)):
        return None
    return "the bytes that came back are not those that went out"
