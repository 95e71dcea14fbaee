"""On a GPU: bytes against the reference, streams, pinned records, slots that are overwritten at once, the sanitizer."""

from __future__ import annotations

import shutil

import pytest
import torch

from kernels import trial
from kernels.build import build
from kernels.native import NativeKernels
from kernels.reference import TorchKernels
from kernels.table import PoolTable
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import kernels as loader

from .conftest import LIBRARIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
ENCODINGS = pytest.mark.parametrize("encoding", list(CheckpointDtype))


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def library(device):
    arch = "".join(map(str, torch.cuda.get_device_capability(device)))
    return build(LIBRARIES / "here.so", (arch,), ffi=False).path


def qwen(device, layers=24, slots=6, heads=8) -> PoolTable:
    """Return the states of Qwen3.5-9B at TP4, random."""
    return PoolTable(
        torch.randn((layers, slots, heads, 128, 128), device=device),
        torch.randn((layers, slots, 2048, 3), device=device).to(torch.bfloat16),
    )


def test_what_serves_is_compiled_and_passes_the_long_trial(device, tmp_path) -> None:
    pytest.importorskip("tvm_ffi")
    found = loader.load(device, cache=tmp_path)
    assert found.name in ("ahead of time", "compiled at start"), found.reason
    assert trial.differences(found, device, trial.LONG) == []


def test_the_c_entry_points_pass_the_long_trial(device, library) -> None:
    assert trial.differences(NativeKernels(library), device, trial.LONG) == []


def test_the_reference_on_the_gpu_is_the_reference(device) -> None:
    assert trial.differences(TorchKernels("on the GPU"), device, trial.LONG) == []


@ENCODINGS
def test_pinned_records_are_written_and_read_in_place(device, library, encoding) -> None:
    kernels, pool = NativeKernels(library), qwen(device)
    size = pool.form(encoding).record_bytes
    pinned = torch.full((2, size), 0xA5, dtype=torch.uint8).pin_memory()
    wanted = torch.full((2, size), 0xA5, dtype=torch.uint8, device=device)
    kernels.pack(pool, [4, 1], pinned, encoding, most_blocks=4)
    kernels.pack(pool, [4, 1], wanted, encoding)
    torch.cuda.synchronize()
    assert torch.equal(pinned, wanted.cpu())
    back, again = qwen(device), qwen(device)
    kernels.unpack(pinned, [0, 2], back, None, encoding, most_blocks=4)
    kernels.unpack(wanted, [0, 2], again, None, encoding)
    assert torch.equal(back.temporal[:, [0, 2]], again.temporal[:, [0, 2]])
    assert torch.equal(back.conv[:, [0, 2]], again.conv[:, [0, 2]])


@ENCODINGS
def test_a_slot_may_be_overwritten_behind_the_event_of_its_pack(device, library, encoding) -> None:
    kernels, pool = NativeKernels(library), qwen(device)
    size = pool.form(encoding).record_bytes
    side = torch.cuda.Stream(device)
    host = PoolTable(pool.temporal[:, :4].cpu(), pool.conv[:, :4].cpu())
    wanted = torch.zeros((4, size), dtype=torch.uint8)
    TorchKernels("the oracle").pack(host, range(4), wanted, encoding)
    for _ in range(20):
        records = torch.full((4, size), 0xA5, dtype=torch.uint8, device=device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kernels.pack(pool, range(4), records, encoding)
            packed = torch.cuda.Event()
            packed.record()
        torch.cuda.current_stream().wait_event(packed)
        kept = pool.temporal[:, :4].clone()
        pool.temporal[:, :4] = -1.0
        pool.temporal[:, :4] = kept
        assert torch.equal(records.cpu(), wanted)


def test_pack_can_be_part_of_a_graph(device, library) -> None:
    kernels, pool = NativeKernels(library), qwen(device, layers=2)
    size = pool.form(CheckpointDtype.INT8).record_bytes
    records = torch.zeros((2, size), dtype=torch.uint8, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.tensor([1, 3], device=device)
    kernels.pack(pool, slots, records, CheckpointDtype.INT8, flags=flags)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.pack(pool, slots, records, CheckpointDtype.INT8, flags=flags)
    pool.temporal.normal_()
    slots.copy_(torch.tensor([5, 0], device=device))
    graph.replay()
    wanted = torch.zeros_like(records)
    kernels.pack(pool, [5, 0], wanted, CheckpointDtype.INT8)
    assert torch.equal(records, wanted)


@pytest.mark.parametrize("tool", trial.TOOLS)
def test_the_sanitizer_finds_nothing(library, tool) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    assert trial.sanitize(tool, library) == (True, "")
