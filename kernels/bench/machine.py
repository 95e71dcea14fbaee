"""Step 0: what this is, and whether the kernels do what they should here. Without that the rest means nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import trial
from .steps import Bench

_QUERY = "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pci.bus_id"


def run(bench: Bench) -> None:
    device = bench.device
    facts: dict[str, Any] = {
        "dry_run": device.dry_run,
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_bindings": _installed("cuda.bindings"),
        "tvm_ffi": _installed("tvm_ffi"),
        "attributes": device.attributes(),
    }
    if not device.dry_run:
        properties = torch.cuda.get_device_properties(device.torch)
        facts |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    facts |= _driver()
    bench.row(what="machine", **facts)
    wrong = trial.differences(device.kernels, device.torch, trial.LONG)
    device.synchronize()
    bench.row(what="trial", cases=len(trial.LONG), differences=wrong, ok=not wrong)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _driver() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"driver": None}
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        driver, gen, most, width, bus = (cell.strip() for cell in said.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return {"driver": f"nvidia-smi did not answer ({type(error).__name__})"}
    # nvidia-smi prints a domain of 8 digits, sysfs has 4.
    node = Path("/sys/bus/pci/devices") / bus.lower()[-12:] / "numa_node"
    return {
        "driver": driver,
        "pcie_generation": gen,
        "pcie_generation_most": most,
        "pcie_width": width,
        "numa_node": node.read_text().strip() if node.exists() else None,
    }
