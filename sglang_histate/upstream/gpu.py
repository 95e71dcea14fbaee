"""Is there a GPU that SGLang's CUDA build can use? Answered without initialising CUDA in this process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_NVML_SUCCESS = 0


def gpu_present(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a CUDA device is visible to processes started from here.

    The driver's management library is asked, not CUDA: a CUDA context in the launcher would survive into its
    children. False without a driver, with CUDA_VISIBLE_DEVICES set to nothing, and where torch is a CPU-only
    build.
    """
    env = os.environ if environ is None else environ
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return False
    if not _torch_has_cuda():
        return False
    count = _nvml_device_count()
    if count is not None:
        return count > 0
    # Containers may get the device files without NVML (driver capability "compute" alone).
    return _has_device_files() and _ask_torch(env)


def _nvml_device_count() -> int | None:
    """Return the number of GPUs, or None where the management library is missing or refuses."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != _NVML_SUCCESS:
        return None
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _NVML_SUCCESS else None
    finally:
        nvml.nvmlShutdown()


def _torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build; reads its version file, importing torch takes
    seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) is None


def _has_device_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _ask_torch(env: Mapping[str, str]) -> bool:
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    try:
        done = subprocess.run([sys.executable, "-c", code], env=dict(env), capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
