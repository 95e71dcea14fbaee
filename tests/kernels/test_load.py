"""Which form serves on a device, and that it says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import kernels as loader
from sglang_histate.copy._kernels import build, trial
from sglang_histate.copy._kernels.reference import TorchKernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHIPPED = build.Built(Path("shipped.so"), "sources", ("80", "90", "100"), "nvcc 13", "0.1", ())


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0 as far as `load` can see, on which everything works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(build, "source_hash", lambda extra=(): "sources")
    monkeypatch.setattr(build, "read_built", lambda path: SHIPPED)
    monkeypatch.setattr(build, "build", lambda path, archs: replace(SHIPPED, path=path, archs=archs))
    opened = []

    class Opened(TorchKernels):
        def __init__(self, path, name, reason):
            super().__init__(reason)
            self.name = name
            opened.append(path)

    monkeypatch.setattr(loader, "CompiledKernels", Opened)
    monkeypatch.setattr(trial, "differences", lambda kernels, device: [])
    return opened


def test_without_a_gpu_torch_serves() -> None:
    found = loader.load(CPU)
    assert found.name == "torch" and "CUDA devices only, not for cpu" in found.reason


def test_what_was_built_ahead_of_time_comes_first(gpu, tmp_path) -> None:
    found = loader.load(CUDA, shipped=tmp_path / "shipped.so")
    assert found.name == "ahead of time" and gpu == [tmp_path / "shipped.so"]


@pytest.mark.parametrize(
    ("shipped", "why"),
    [
        (None, "make kernels"),
        (replace(SHIPPED, source="older"), "other sources"),
        (replace(SHIPPED, archs=("80",)), None),
    ],
)
def test_else_it_is_compiled_for_this_gpu_into_the_cache(gpu, monkeypatch, tmp_path, shipped, why) -> None:
    monkeypatch.setattr(build, "read_built", lambda path: shipped)
    if why is None:  # compiled for sm_80 with its PTX: a later GPU can run that
        assert loader.load(CUDA, cache=tmp_path).name == "ahead of time"
        return
    found = loader.load(CUDA, cache=tmp_path)
    assert found.name == "compiled at start" and gpu == [tmp_path / "sources-sm_90.so"]


def test_a_library_for_later_gpus_only_is_not_taken(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "read_built", lambda path: replace(SHIPPED, archs=("100",)))
    assert loader.load(CUDA, cache=tmp_path).name == "compiled at start"


def test_where_nothing_can_be_had_torch_serves_and_says_why(gpu, monkeypatch, tmp_path) -> None:
    def no_compiler(path, archs):
        raise build.BuildError("no nvcc was found: set CUDA_HOME\nmore")

    monkeypatch.setattr(build, "read_built", lambda path: replace(SHIPPED, archs=("100",)))
    monkeypatch.setattr(build, "build", no_compiler)
    found = loader.load(CUDA, cache=tmp_path)
    assert found.name == "torch"
    assert found.reason == (
        "those built ahead of time are for sm_100, not for 9.0; "
        "none could be compiled here (no nvcc was found: set CUDA_HOME)"
    )


@pytest.mark.parametrize("error", [OSError("undefined symbol"), ImportError("No module named 'tvm_ffi'")])
def test_a_library_that_cannot_be_loaded_is_none(gpu, monkeypatch, tmp_path, error) -> None:
    def refuses(path, name, reason):
        raise error

    monkeypatch.setattr(loader, "CompiledKernels", refuses)
    found = loader.load(CUDA, cache=tmp_path)
    assert found.name == "torch" and found.reason.count(f"cannot be loaded ({error})") == 2


def test_kernels_that_write_other_bytes_are_not_used(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trial, "differences", lambda kernels, device: ["int8 [2, 128, 128]"])
    found = loader.load(CUDA, cache=tmp_path)
    assert found.name == "torch" and "other bytes than the reference (int8 [2, 128, 128])" in found.reason


def test_kernels_that_fail_in_a_trial_are_not_used(gpu, monkeypatch, tmp_path) -> None:
    def fails(kernels, device):
        raise RuntimeError("the CUDA runtime refused the launch (cudaError 209)\nmore")

    monkeypatch.setattr(trial, "differences", fails)
    found = loader.load(CUDA, cache=tmp_path)
    assert found.name == "torch" and "cudaError 209)" in found.reason and "more" not in found.reason


def test_gpus_that_are_too_old_or_none_of_cuda(gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "this GPU has 7.5" in loader.load(CUDA).reason
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in loader.load(CUDA).reason


def test_the_trial_passes_for_the_kernels_code_and_finds_what_is_wrong(host_kernels) -> None:
    assert loader.checked(host_kernels, CPU) is host_kernels

    class Wrong(TorchKernels):
        def _pack(self, pool, form, slots, records, flags, most_blocks):
            super()._pack(pool, form, slots, records, flags, most_blocks)
            if form.codec.encoding is self.broken:
                getattr(self, self.how)(records, flags)

        def one_bit(self, records, flags):
            records[0, 77] ^= 1

        def no_flag(self, records, flags):
            flags.zero_()

    for broken in CheckpointDtype:
        for how in ("one_bit", "no_flag"):
            wrong = Wrong("")
            wrong.broken, wrong.how = broken, how
            found = trial.differences(wrong, CPU)
            assert found and all(text.startswith(broken.value) for text in found)


def test_the_cache_is_the_users(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.cache_dir() == tmp_path / "sglang-histate" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert loader.cache_dir() == Path.home() / ".cache" / "sglang-histate" / "kernels"
