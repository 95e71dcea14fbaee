"""`histate doctor`: what a bug report starts with, and whether serving can work here at all."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_SIZE_TOKENS = 64  # what the launcher asks SGLang for: states can only be captured on this grid


@dataclass
class _Report:
    """Facts in the order they are printed; problems make serving impossible, warnings do not."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def register(subparsers: Any) -> None:
    """Add the command to the parser of `histate`."""
    parser = subparsers.add_parser(
        "doctor",
        help="print versions, patches, device and SSD facts for a bug report",
        description="Print versions, patches, device and SSD facts for a bug report, and what is wrong with them.",
        epilog="examples:\n  histate doctor\n  histate doctor --ssd-dir /nvme/histate --json\n\n"
        "exit codes: 0 nothing is wrong; 1 something is, in the lines that begin with problem; 2 bad usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ssd-dir", type=Path, metavar="DIR", help="the directory meant for --histate-ssd-dir"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    report = _Report()
    _versions(report)
    gpu = _device(report)
    _overlay(report, gpu)
    _ssd(report, arguments.ssd_dir)
    if arguments.json:
        print(
            json.dumps({**report.facts, "warnings": report.warnings, "problems": report.problems}, indent=1)
        )
    else:
        for name, value in report.facts.items():
            print(f"{name.replace('_', ' '):<22}{_shown(value)}")
        for warning in report.warnings:
            print(f"warning: {warning}")
        for problem in report.problems:
            print(f"problem: {problem}")
    return 1 if report.problems else 0


def _versions(report: _Report) -> None:
    import sglang_histate
    from sglang_histate.upstream import pin
    from sglang_histate.upstream.errors import UpstreamError

    report.facts |= {
        "histate": sglang_histate.__version__,
        "python": platform.python_version(),
        "torch": pin.installed_version("torch"),
        "sglang": pin.installed_version("sglang"),
        "sglang_wanted": pin.read_pin().version,
        "pin_ok": True,
    }
    if report.facts["torch"] is None:
        report.problems.append("torch is not installed: install sglang with its dependencies")
    try:
        pin.check()
    except UpstreamError as error:
        report.facts["pin_ok"] = False
        report.problems.append(str(error))


def _device(report: _Report) -> bool:
    from sglang_histate.upstream.gpu import gpu_present

    gpu = gpu_present()
    name, capability = "cpu", (0, 0)
    if gpu:
        # This process ends here, so CUDA may be initialised in it.
        try:
            import torch

            name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            report.problems.append(f"the driver reports a GPU but torch cannot use it: {first_line}")
    report.facts |= {
        "device": name,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "page_size_tokens": PAGE_SIZE_TOKENS,
        "kernels": _kernels(gpu, capability),
    }
    _copies(report, gpu)
    return gpu


def _copies(report: _Report, gpu: bool) -> None:
    """Say what moves bytes between device and host: the same probe as at the start of a server."""
    try:
        import torch

        from sglang_histate.config import CheckpointDtype
        from sglang_histate.copy import choose_engine
        from sglang_histate.copy.packing import choose_packing

        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        chosen = choose_engine(device)
    except Exception as error:
        report.problems.append(f"no copy engine: {str(error).partition(chr(10))[0]}")
        return
    report.facts["copy_engine"] = chosen.engine.name
    report.facts["copy_engines_rejected"] = [f"{name}: {reason}" for name, reason in chosen.rejected.items()]
    for name, reason in chosen.rejected.items():
        report.warnings.append(f"copies do not go by {name}: {reason}")
    # What records of any encoding but native would be packed by.
    packing = choose_packing(device, CheckpointDtype.BF16)
    report.facts["copy_pack"] = f"{packing.name}: {packing.reason}"
    if packing.is_slow:
        report.warnings.append(f"encoded records are packed by torch, not by kernels: {packing.reason}")


def _kernels(gpu: bool, capability: tuple[int, int]) -> str:
    """Name the linear-attention kernels, by the rule of `flashinfer_gdn_prefill_default` in sglang 0.5.23.

    The server decides from the model and flags too (head size 128, chunk size, state dtype); this is the
    default.
    """
    import importlib.util

    if not gpu:
        return "CPU torch ops"
    if capability[0] in (9, 10) and importlib.util.find_spec("flashinfer") is not None:
        return "FlashInfer GDN prefill where the model allows it, else Triton GDN"
    return "Triton GDN"


def _overlay(report: _Report, gpu: bool) -> None:
    from sglang_histate.upstream import overlay, series, tree
    from sglang_histate.upstream.errors import UpstreamError
    from sglang_histate.upstream.locations import installed_sglang

    groups = overlay.groups_for(histate=True, gpu=gpu)
    report.facts["patch_groups"] = list(groups)
    try:
        found, built = overlay.find_overlay(groups)
        report.facts |= {
            "overlay": str(found.path),
            "overlay_built": built,
            "overlay_active_here": os.environ.get(overlay.OVERLAY_VARIABLE) == str(found.path),
            "patches": list(found.patches),
            "sgl_kernel": "stand-in" if found.stand_in else "installed",
        }
        if not built:
            tree.apply_groups([series.read_group(group) for group in groups], installed_sglang().parent)
    except UpstreamError as error:
        report.problems.append(str(error))


def _ssd(report: _Report, path: Path | None) -> None:
    from sglang_histate.sizes import format_size
    from sglang_histate.store.probe import probe_directory

    if path is None:
        report.facts["ssd_dir"] = "not given (--ssd-dir DIR)"
        return
    report.facts["ssd_dir"] = str(path)
    if not path.exists() and path.parent.is_dir():
        report.facts["ssd_dir_exists"] = False
        report.warnings.append(f"{path} does not exist yet: these are the facts of {path.parent}")
        facts = probe_directory(path.parent)
    else:
        try:
            facts = probe_directory(path)
        except OSError as error:
            report.problems.append(
                f"--ssd-dir {path} cannot be used ({error.strerror}): create it or use another"
            )
            return
        if facts.owner_uid != os.geteuid():
            report.problems.append(
                f"--ssd-dir {path} belongs to user {facts.owner_uid}, not to {os.geteuid()}: use your own"
            )
        if facts.mode & 0o022:
            report.problems.append(f"--ssd-dir {path} may be written by other users: run chmod 700 {path}")
    report.facts |= {
        "ssd_filesystem": facts.filesystem,
        "ssd_direct_io": facts.direct_io,
        "ssd_writable": facts.writable,
        "ssd_free": format_size(facts.free_bytes),
        "ssd_free_bytes": facts.free_bytes,
        "ssd_owner_uid": facts.owner_uid,
        "ssd_mode": f"{facts.mode:04o}",
        "ssd_stores": [f"{name} {format_size(size)}" for name, size in facts.stores],
    }
    if not facts.writable:
        report.problems.append(f"{facts.path} is not writable: check permissions and mount options")
    if not facts.suitable:
        report.warnings.append(
            f"{facts.path} is on {facts.filesystem}, which is no local disk: use a local SSD"
        )
    elif not facts.direct_io:
        report.warnings.append(f"{facts.path} does not take O_DIRECT: reads go through the page cache")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)
