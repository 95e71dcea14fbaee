"""Whether a GPU is there, without one and without touching CUDA."""

from __future__ import annotations

import pytest

from sglang_histate.upstream import gpu


@pytest.fixture
def cuda_build(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "_torch_has_cuda", lambda: True)


def test_the_management_library_decides(monkeypatch, cuda_build) -> None:
    monkeypatch.setattr(gpu, "_nvml_device_count", lambda: 2)
    assert gpu.gpu_present({})
    assert gpu.gpu_present({"CUDA_VISIBLE_DEVICES": "1"})
    for hidden in ("", "-1"):
        assert not gpu.gpu_present({"CUDA_VISIBLE_DEVICES": hidden})
    monkeypatch.setattr(gpu, "_nvml_device_count", lambda: 0)
    assert not gpu.gpu_present({})


def test_without_the_library_device_files_and_torch_decide(monkeypatch, cuda_build) -> None:
    monkeypatch.setattr(gpu, "_nvml_device_count", lambda: None)
    monkeypatch.setattr(gpu, "_has_device_files", lambda: False)
    monkeypatch.setattr(
        gpu, "_ask_torch", lambda env: pytest.fail("torch must not be asked without device files")
    )
    assert not gpu.gpu_present({})
    monkeypatch.setattr(gpu, "_has_device_files", lambda: True)
    monkeypatch.setattr(gpu, "_ask_torch", lambda env: True)
    assert gpu.gpu_present({})


def test_a_cpu_build_of_torch_has_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "_torch_has_cuda", lambda: False)
    monkeypatch.setattr(gpu, "_nvml_device_count", lambda: 1)
    assert not gpu.gpu_present({})


def test_a_missing_driver_is_no_error(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    assert gpu._nvml_device_count() is None


def test_it_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    before = torch.cuda.is_initialized()
    assert gpu.gpu_present() == (torch.cuda.device_count() > 0)
    assert torch.cuda.is_initialized() == before
