"""Which form of `pack` and `unpack` serves on a device, and why. Asked once at start.

    ahead of time      the library that ``make kernels`` put beside the sources, if it was built from them and for this GPU
    compiled at start  nvcc is asked for this GPU alone; some seconds, once per version of the sources and user
    torch              `copy._kernels.reference`, where neither can be had, and without a GPU

What was loaded is tried on a small pool before it is used: kernels that write other bytes than the reference are as good
as none.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ._kernels import build, trial
from ._kernels.compiled import CompiledKernels
from ._kernels.face import NO_SUCH_SLOT, NOT_FINITE, Kernels
from ._kernels.reference import TorchKernels
from ._kernels.table import PoolTable, RecordForm

__all__ = ["NOT_FINITE", "NO_SUCH_SLOT", "Kernels", "PoolTable", "RecordForm", "load"]

LEAST_CAPABILITY = (8, 0)


def load(device: torch.device, *, shipped: Path = build.SHIPPED, cache: Path | None = None) -> Kernels:
    """Return what serves on `device`; `reason` says why it is that and nothing better.

    `shipped` is where ``make kernels`` puts its library, `cache` where others are built, by default in the user's cache
    directory. Raises nothing that a missing compiler, library or GPU could cause.
    """
    if device.type != "cuda":
        return TorchKernels(f"there are kernels for CUDA devices only, not for {device.type}")
    if torch.version.hip is not None:
        return TorchKernels("the kernels have not been built for ROCm")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return TorchKernels(f"the kernels need compute capability 8.0, this GPU has {_dotted(capability)}")
    refusals = []
    for way in (_shipped, _compiled):
        try:
            found = way(shipped, cache or cache_dir(), capability)
            return checked(found, device)
        except _Unfit as unfit:
            refusals.append(str(unfit))
    return TorchKernels("; ".join(refusals))


class _Unfit(Exception):
    """Why one way does not serve."""


def cache_dir() -> Path:
    """Return where libraries for one GPU are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-histate" / "kernels"


def checked(kernels: Kernels, device: torch.device) -> Kernels:
    """Return `kernels` if they do on `device` what the reference does on the CPU."""
    try:
        wrong = trial.differences(kernels, device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _Unfit(f"{kernels.name}: a trial failed ({_first_line(error)})") from None
    if wrong:
        raise _Unfit(f"{kernels.name}: a trial gave other bytes than the reference ({', '.join(wrong)})")
    return kernels


def _shipped(shipped: Path, cache: Path, capability: tuple[int, int]) -> Kernels:
    found = build.read_built(shipped)
    if found is None:
        raise _Unfit("none were built ahead of time (`make kernels` builds them)")
    if found.source != build.source_hash():
        raise _Unfit("those built ahead of time are of other sources (`make kernels` builds them again)")
    if not found.covers(capability):
        archs = ", ".join(f"sm_{arch}" for arch in found.archs)
        raise _Unfit(f"those built ahead of time are for {archs}, not for {_dotted(capability)}")
    return _opened(shipped, "ahead of time", f"built by {found.compiler}")


def _compiled(shipped: Path, cache: Path, capability: tuple[int, int]) -> Kernels:
    arch = f"{capability[0]}{capability[1]}"
    path = cache / f"{build.source_hash([build.ffi_version()])}-sm_{arch}.so"
    try:
        built = build.build(path, (arch,))
    except (build.BuildError, OSError) as error:
        raise _Unfit(f"none could be compiled here ({_first_line(error)})") from None
    return _opened(built.path, "compiled at start", f"built by {built.compiler}")


def _opened(path: Path, name: str, reason: str) -> Kernels:
    try:
        return CompiledKernels(path, name, reason)
    except (ImportError, OSError, RuntimeError) as error:
        raise _Unfit(f"{name}: the library cannot be loaded ({_first_line(error)})") from None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
