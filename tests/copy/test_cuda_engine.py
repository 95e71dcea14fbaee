"""The rules of the batch call, on a runtime that keeps them as the real one does; and which engine a device gets."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_histate.copy import probe
from sglang_histate.copy.cuda_engine import BatchEngine, CudaDriver, LoopEngine
from sglang_histate.copy.engine import CopyEngine, CopyError
from sglang_histate.copy.plan import CopyPlan, PlanError
from sglang_histate.copy.torch_engine import TorchEngine
from sglang_histate.copy.transfer import MAX_DESCRIPTORS, Move, Space, Transfer

INVALID, ILLEGAL = 1, 700


class Runtime:
    """cuda.bindings.runtime on host memory: refuses what the driver refuses, and copies the rest."""

    cudaMemcpySrcAccessOrder = SimpleNamespace(
        cudaMemcpySrcAccessOrderInvalid=0, cudaMemcpySrcAccessOrderStream=1, cudaMemcpySrcAccessOrderAny=3
    )
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaError_t = SimpleNamespace(cudaErrorInvalidValue=INVALID)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem=91)

    def __init__(self, codes=(), single_codes=()) -> None:
        self.codes, self.single_codes = list(codes), list(single_codes)
        self.batches: list[int] = []
        self.singles = 0

    def cudaMemcpyAttributes(self):
        return SimpleNamespace(srcAccessOrder=0, flags=None)

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, attributes, starts, sets, stream):
        assert len(targets) == len(sources) == len(sizes) == count
        if self.codes:
            code = self.codes.pop(0)
            if code:
                return (code,)
        valid = (
            stream not in (0, 1)
            and 0 < count <= MAX_DESCRIPTORS
            and min(sizes) > 0
            and sets == len(attributes) == len(starts) == 1
            and starts == [0]
            and attributes[0].srcAccessOrder == 1
            and attributes[0].flags == 0
        )
        if not valid:
            return (INVALID,)
        self.batches.append(count)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return (0,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        assert kind == 4 and stream not in (0, 1)
        code = self.single_codes.pop(0) if self.single_codes else 0
        if code == 0:
            self.singles += 1
            ctypes.memmove(target, source, size)
        return (code,)


class Streams:
    """torch.cuda, as far as a driver asks."""

    def __init__(self, handle: int = 77, capturing: bool = False) -> None:
        self.handle, self.capturing = handle, capturing

    def current_stream(self):
        return SimpleNamespace(cuda_stream=self.handle)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


def transfer(count: int = 3, size: int = 4, pinned: bool = True) -> Transfer:
    source = Space("the arena", torch.arange(8 * count, dtype=torch.int64).to(torch.uint8), pinned=pinned)
    target = Space("the pool", torch.zeros(8 * count, dtype=torch.uint8))
    return Transfer(CopyPlan.blocks(np.arange(count) * 8, np.arange(count)[::-1] * 8, size), source, target)


def arrived(copy: Transfer) -> bool:
    wanted = torch.zeros_like(copy.target.flat)
    for start, to, size in copy.plan.pieces():
        wanted[to : to + size] = copy.source.flat[start : start + size]
    return torch.equal(copy.target.flat, wanted)


def test_one_call_for_a_group_as_the_driver_wants_it() -> None:
    runtime, copies = Runtime(), [transfer(), transfer(5)]
    engine = BatchEngine(CudaDriver(runtime, Streams()))
    engine.submit(copies)
    assert runtime.batches == [8] and runtime.singles == 0 and all(map(arrived, copies))
    assert engine.fallback is None


def test_many_pieces_go_in_calls_of_at_most_1024_and_none_is_empty() -> None:
    runtime, copy = Runtime(), transfer(2500)
    copy.plan.sizes[10] = 0
    BatchEngine(CudaDriver(runtime, Streams())).submit([copy])
    assert runtime.batches == [1024, 1024, 451] and arrived(copy)


def test_nothing_to_copy_is_no_call() -> None:
    runtime = Runtime()
    BatchEngine(CudaDriver(runtime, Streams())).submit([])
    assert runtime.batches == [] and runtime.singles == 0


@pytest.mark.parametrize("make", [BatchEngine, LoopEngine])
def test_never_on_the_default_stream_nor_in_a_capture(make) -> None:
    for streams, complaint in (
        (Streams(0), "default stream"),
        (Streams(1), "default stream"),
        (Streams(77, capturing=True), "CUDA graph"),
    ):
        runtime, copy = Runtime(), transfer()
        with pytest.raises(CopyError, match=complaint):
            make(CudaDriver(runtime, streams)).submit([copy])
        assert runtime.batches == [] and runtime.singles == 0 and (copy.target.flat == 0).all()


def test_an_invalid_call_falls_back_to_the_loop_for_good_and_says_so(caplog) -> None:
    runtime, copies = Runtime(codes=[0, INVALID]), [transfer() for _ in range(3)]
    engine = BatchEngine(CudaDriver(runtime, Streams()))
    for copy in copies:
        engine.submit([copy])
    assert all(map(arrived, copies)) and runtime.batches == [3] and runtime.singles == 6
    assert engine.fallback == "a call with 3 pieces was answered with CUDA error 1"
    assert caplog.text.count("cudaMemcpyBatchAsync is not used any more") == 1


def test_the_calls_behind_an_invalid_one_go_by_the_loop_too() -> None:
    runtime, copy = Runtime(codes=[0, INVALID]), transfer(2500)
    BatchEngine(CudaDriver(runtime, Streams())).submit([copy])
    assert runtime.batches == [1024] and runtime.singles == 2500 - 1024 and arrived(copy)


def test_other_errors_are_not_papered_over() -> None:
    with pytest.raises(CopyError, match="cudaMemcpyBatchAsync of 3 pieces failed with CUDA error 700"):
        BatchEngine(CudaDriver(Runtime(codes=[ILLEGAL]), Streams())).submit([transfer()])
    with pytest.raises(CopyError, match=r"CUDA error 700 \(piece 1 of 3\)"):
        LoopEngine(CudaDriver(Runtime(single_codes=[0, ILLEGAL]), Streams())).submit([transfer()])


def test_host_memory_that_is_not_pinned_goes_by_the_loop() -> None:
    runtime, copies = Runtime(), [transfer(), transfer(pinned=False)]
    engine = BatchEngine(CudaDriver(runtime, Streams()))
    engine.submit(copies)
    assert runtime.batches == [] and runtime.singles == 6 and all(map(arrived, copies))
    engine.submit([transfer()])
    assert runtime.batches == [3] and engine.fallback is None
    moved = Move(torch.ones(4), torch.zeros(4))
    engine.submit([moved])
    assert runtime.singles == 7 and (moved.target == 1).all()


def test_a_wrong_plan_reaches_no_driver() -> None:
    copy = transfer()
    copy.plan.targets[0] = 23
    for make in (BatchEngine, LoopEngine):
        runtime = Runtime()
        with pytest.raises(PlanError, match="the pool"):
            make(CudaDriver(runtime, Streams())).submit([copy])
        assert runtime.batches == [] and runtime.singles == 0


def spaces() -> tuple[Space, Space]:
    size = probe.PIECES * probe.PIECE_BYTES
    return (
        Space("host", torch.zeros(2 * size, dtype=torch.uint8)),
        Space("device", torch.zeros(size, dtype=torch.uint8)),
    )


class Silent(CopyEngine):
    name = "silent"

    def submit(self, copies) -> None:
        pass


def attempt(engine: CopyEngine) -> str | None:
    return probe.round_trip(engine, *spaces(), lambda: None)


def choose(*engines: tuple[str, object]):
    def made(what):
        if isinstance(what, Exception):
            raise what
        return what

    return probe.first_that_works([(name, lambda what=what: made(what)) for name, what in engines], attempt)


def test_the_first_engine_that_moves_bytes_is_chosen() -> None:
    batch = BatchEngine(CudaDriver(Runtime(), Streams()))
    assert choose(("batch", batch), ("torch", TorchEngine())).engine is batch
    loop = LoopEngine(CudaDriver(Runtime(), Streams()))
    chosen = choose(
        ("missing", ModuleNotFoundError("No module named 'cuda'")),
        ("invalid", BatchEngine(CudaDriver(Runtime(codes=[INVALID]), Streams()))),
        ("silent", Silent()),
        ("refused", BatchEngine(CudaDriver(Runtime(codes=[ILLEGAL]), Streams()))),
        ("loop", loop),
    )
    assert chosen.engine is loop
    assert chosen.rejected == {
        "missing": "ModuleNotFoundError: No module named 'cuda'",
        "invalid": "a call with 8 pieces was answered with CUDA error 1",
        "silent": "the bytes that came back are not those that went out",
        "refused": "CopyError: cudaMemcpyBatchAsync of 8 pieces failed with CUDA error 700",
    }
    assert chosen.as_json() == {
        "name": "cudaMemcpyAsync",
        "fallback": None,
        "rejected": chosen.rejected,
    }
    with pytest.raises(RuntimeError, match=r"nothing can copy.*silent: the bytes"):
        choose(("silent", Silent()))


def test_the_order_of_the_engines_and_the_one_without_a_gpu() -> None:
    assert [name for name, _ in probe.candidates(torch.device("cuda", 0))] == [
        "cudaMemcpyBatchAsync",
        "cudaMemcpyAsync",
        "torch",
    ]
    chosen = probe.choose_engine(torch.device("cpu"))
    assert chosen.engine.name == "cpu" and chosen.rejected == {}


def test_the_real_bindings_take_what_the_driver_is_built_with() -> None:
    """Names and types of cuda.bindings, without a device: a call ends with an error code, not an exception."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    driver = CudaDriver(runtime, Streams())
    assert driver.is_invalid_value(int(runtime.cudaError_t.cudaErrorInvalidValue))
    if torch.cuda.is_available():
        pytest.skip("the call would go to a device with a stream that is none")
    with pytest.raises(CopyError, match="CUDA error"):
        LoopEngine(driver).submit([transfer()])
    engine = BatchEngine(driver)
    with pytest.raises(CopyError, match="CUDA error"):
        engine.submit([transfer()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_first_choice_works_and_is_exact() -> None:
    device = torch.device("cuda", 0)
    chosen = probe.choose_engine(device)
    for _, make in probe.candidates(device):
        assert probe.try_on_cuda(make(), device) is None
    assert chosen.engine.name == "cudaMemcpyBatchAsync", chosen.rejected
