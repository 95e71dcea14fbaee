"""``python -m kernels.trial``: some form of `pack` and `unpack` against the torch reference on the CPU, byte for byte.

Outputs are poisoned first, so a byte that is not written shows, and so does one that should not have been. A server makes
the short trial at start. The command makes the long one on a GPU with the C entry points; ``--sanitize`` makes it under
compute-sanitizer (memcheck, racecheck, initcheck, one after the other), which takes a minute or two.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_histate.config import CheckpointDtype

from . import build
from .face import Kernels
from .reference import TorchKernels
from .table import PoolTable

POISON = 0xA5
TOOLS = ("memcheck", "racecheck", "initcheck")
LIBRARY = Path("build") / "kernels" / "trial.so"
REFERENCE = TorchKernels("the oracle")


@dataclass(frozen=True)
class Case:
    """A pool, what is packed and what is unpacked. `gap` bytes lie between two slots."""

    temporal: tuple[int, int, int]
    conv: tuple[int, int]
    layers: int = 2
    slots: int = 4
    gap: int = 0
    dtype: torch.dtype = torch.float32
    packed: tuple[int, ...] = (2, 3, 1)
    targets: tuple[int, ...] = (0, 3, 1)
    sources: tuple[int, ...] = (2, 0, 2)
    group: tuple[int, int] | None = None
    most_blocks: int = 0

    def __str__(self) -> str:
        return f"{list(self.temporal)} {str(self.dtype).removeprefix('torch.')} gap {self.gap}"


SHORT = (Case((2, 128, 128), (40, 3)), Case((3, 5, 7), (3, 3)))
LONG = (
    *SHORT,
    Case((4, 128, 128), (1024, 3), layers=6, slots=9, packed=(8, 0, 5, 5), sources=(1, 0, 3), group=(2, 5)),
    Case((2, 128, 128), (40, 3), gap=48, most_blocks=2),
    Case((2, 128, 128), (41, 3), gap=20, group=(1, 2)),
    Case((1, 64, 256), (9, 4), most_blocks=1),
    Case((3, 33, 70), (5, 1), gap=4),
    Case((2, 128, 128), (40, 3), dtype=torch.bfloat16),
    Case((2, 5, 7), (3, 3), dtype=torch.float16, gap=2),
    Case(
        (1, 3, 4),
        (5, 3),
        slots=150,
        packed=tuple(range(150)),
        targets=tuple(range(149, -1, -1)),
        sources=tuple(7 * i % 150 for i in range(150)),
    ),
    Case((1, 128, 128), (40, 3), packed=(1,), targets=(0, 2, 3, 1), sources=(0, 0, 0, 0)),
)


def differences(kernels: Kernels, device: torch.device, cases: tuple[Case, ...] = SHORT) -> list[str]:
    """Return in words which cases `kernels` do otherwise on `device` than the reference does on the CPU."""
    return [
        f"{encoding} {case}: {what}" for case in cases for encoding, what in _of_case(kernels, device, case)
    ]


def _of_case(kernels: Kernels, device: torch.device, case: Case) -> Iterator[tuple[str, str]]:
    host, _ = _pool(case, torch.device("cpu"))
    numbers = torch.Generator().manual_seed(1)
    for tensor in (host.temporal, host.conv):
        tensor.copy_(torch.randn(tensor.shape, generator=numbers))
    host.temporal[-1, case.packed[len(case.packed) // 2], 0, 2, 1] = torch.nan  # one of the records is bad
    there, _ = _pool(case, device)
    there.temporal.copy_(host.temporal)
    there.conv.copy_(host.conv)
    layers = None if case.group is None else range(*case.group)
    for encoding in CheckpointDtype if case.dtype is torch.float32 else (CheckpointDtype.NATIVE,):
        shape = (len(case.packed), host.form(encoding).record_bytes + 16)
        wanted = torch.full(shape, POISON, dtype=torch.uint8)
        wanted_flags = REFERENCE.pack(host, case.packed, wanted, encoding)
        clean = wanted_flags == 0
        for slots in (torch.tensor(case.packed), torch.tensor(case.packed, device=device)):
            got = torch.full(shape, POISON, dtype=torch.uint8, device=device)
            flags = kernels.pack(there, slots, got, encoding, most_blocks=case.most_blocks)
            if not torch.equal(flags.cpu(), wanted_flags):
                yield encoding.value, f"flags {flags.tolist()} instead of {wanted_flags.tolist()}"
            if not torch.equal(got.cpu()[clean], wanted[clean]):
                yield encoding.value, f"pack, slots on {slots.device}"
        # The bad record is restored too: what its bytes stand for is not defined, so both forms get the same bytes.
        wanted = torch.where(clean[:, None], wanted, 0)
        for slots in (torch.tensor(case.targets), torch.tensor(case.targets, device=device)):
            (back, memory), (back_there, memory_there) = _pool(case, torch.device("cpu")), _pool(case, device)
            REFERENCE.unpack(wanted, case.targets, back, layers, encoding, sources=case.sources)
            kernels.unpack(
                *(wanted.to(device), slots, back_there, layers, encoding),
                sources=case.sources,
                most_blocks=case.most_blocks,
            )
            if not all(torch.equal(a, b.cpu()) for a, b in zip(memory, memory_there, strict=True)):
                yield encoding.value, f"unpack, slots on {slots.device}"


def _pool(case: Case, device: torch.device) -> tuple[PoolTable, tuple[torch.Tensor, torch.Tensor]]:
    """Return a poisoned pool, and the memory under it with all that lies between the slots."""
    tensors, memories = [], []
    for row, dtype in ((case.temporal, case.dtype), (case.conv, torch.bfloat16)):
        size = torch.Size(row).numel()
        step = size + -(-case.gap // dtype.itemsize)
        memory = torch.full(
            (case.layers * case.slots * step * dtype.itemsize,), POISON, dtype=torch.uint8, device=device
        )
        rows = memory.view(dtype).view(case.layers, case.slots, step)[..., :size]
        tensors.append(rows.unflatten(-1, row))
        memories.append(memory)
    return PoolTable(*tensors), (memories[0], memories[1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.trial", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="under compute-sanitizer, once with each tool"
    )
    parser.add_argument("--library", type=Path, help="a built library; default: one is built for this GPU")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: there is no GPU here", file=sys.stderr)
        return 1
    from .native import NativeKernels

    device = torch.device("cuda", torch.cuda.current_device())
    arch = "".join(map(str, torch.cuda.get_device_capability(device)))
    try:
        library = given.library or build.build(LIBRARY, (arch,), ffi=False).path
    except build.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.sanitize:
        found = [(tool, *sanitize(tool, library)) for tool in TOOLS]
        for tool, clean, said in found:
            print(f"{tool}: {'no errors' if clean else said}")
        return 0 if all(clean for _, clean, _ in found) else 1
    wrong = differences(NativeKernels(library), device, LONG)
    torch.cuda.synchronize()
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(LONG)} cases, {len(wrong)} differences")
    return 1 if wrong else 0


def sanitize(tool: str, library: Path, timeout_s: float = 300) -> tuple[bool | None, str]:
    """Return whether compute-sanitizer's `tool` finds nothing in a long trial, and what it said if it does.

    None, and why, where it did not come to an end.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return None, "compute-sanitizer is not installed"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99"]
    command += [sys.executable, "-m", "kernels.trial", "--library", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"{tool} took more than {timeout_s:.0f} s"
    said = (done.stdout + done.stderr)[-3000:]
    if "Device not supported" in said:
        return None, f"{tool}: this device is not supported"
    return done.returncode == 0, "" if done.returncode == 0 else said


if __name__ == "__main__":
    sys.exit(main())
