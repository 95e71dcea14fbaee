"""The kernels' code on the CPU, built once per version of the sources under build/kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import build
from kernels.compiled import CompiledKernels
from kernels.native import NativeKernels, open_library

LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "kernels"


def _built(**options) -> Path:
    try:
        return build.build_host(LIBRARIES / ("trace.so" if options.get("trace") else "host.so"), **options)
    except build.BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def host_kernels() -> CompiledKernels:
    """The CPU form through tvm-ffi, as a server calls the CUDA form."""
    return CompiledKernels(_built(ffi=True), "on the CPU", "for tests")


@pytest.fixture(scope="session")
def c_kernels() -> NativeKernels:
    """The CPU form through ctypes, as the bench calls the CUDA form."""
    return NativeKernels(_built())


@pytest.fixture(scope="session")
def trace():
    """The library that moves nothing and writes down what it would touch."""
    return open_library(_built(trace=True))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: more threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
