"""Plans with the memory that they are about: spaces, transfers, and the descriptors that a driver takes.

A wrong descriptor is a copy over somebody else's bytes, which nothing notices until an answer is wrong. So every
transfer is checked where it is turned into descriptors or run, and what is wrong with it names the two spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_histate.copy.plan import CopyPlan, Offsets, PlanError

MAX_DESCRIPTORS = 1024
"""A call. Tens of thousands in one have hung or crashed drivers; beyond some hundreds nothing is gained."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage under `tensor` as uint8 ``[bytes]``, sharing memory."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


@dataclass(frozen=True, eq=False)
class Space:
    """A run of memory, `flat` uint8 ``[bytes]`` on any device, and its name in messages.

    `chunk_bytes`: the memory was registered with the driver in chunks of that many bytes, and a copy that touches two
    of them fails. `pinned` is False for host memory that the driver does not know.
    """

    name: str
    flat: torch.Tensor
    pinned: bool = True
    chunk_bytes: int | None = None
    address: int = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.flat.dtype is torch.uint8 and self.flat.dim() == 1 and self.flat.is_contiguous()
        object.__setattr__(self, "address", self.flat.data_ptr())
        object.__setattr__(self, "size_bytes", self.flat.numel())


@dataclass(frozen=True, eq=False)
class Transfer:
    """A plan from one space to another."""

    plan: CopyPlan
    source: Space
    target: Space

    def __str__(self) -> str:
        return f"a copy from {self.source.name} to {self.target.name}"

    def check(self) -> None:
        """Bounds, registered chunks, and overlap.

        Raises:
            PlanError: a piece of a negative size, outside its space, over the border of two registered chunks, or over
                another one.
        """
        plan = self.plan
        if not len(plan.sources) == len(plan.targets) == len(plan.sizes):
            raise PlanError(
                f"{self} has {len(plan.sources)} sources, {len(plan.targets)} targets, {len(plan.sizes)} sizes"
            )
        if len(plan) == 0:
            return
        if int(plan.sizes.min()) < 0:
            raise PlanError(f"{self} has a piece of {int(plan.sizes.min())} bytes")
        for space, offsets in ((self.source, plan.sources), (self.target, plan.targets)):
            ends = offsets + plan.sizes
            if int(offsets.min()) < 0 or int(ends.max()) > space.size_bytes:
                worst = int(np.argmin(offsets)) if int(offsets.min()) < 0 else int(np.argmax(ends))
                raise PlanError(
                    f"{self}: piece {worst} is bytes {int(offsets[worst])} to {int(ends[worst])} of {space.name}, "
                    f"which has {space.size_bytes}"
                )
            if space.chunk_bytes is not None and space.size_bytes > space.chunk_bytes:
                last = np.maximum(ends - 1, offsets)
                across = offsets // space.chunk_bytes != last // space.chunk_bytes
                if across.any():
                    worst = int(np.argmax(across))
                    raise PlanError(
                        f"{self}: piece {worst} is bytes {int(offsets[worst])} to {int(ends[worst])} of {space.name}, "
                        f"which is registered in chunks of {space.chunk_bytes}"
                    )
        if len(plan) > 1:
            full = plan.without_empty()
            check_overlap(full.targets, full.sizes, str(self))


@dataclass(frozen=True, eq=False)
class Move:
    """One contiguous tensor into another of the same number of bytes, each a space of its own."""

    source: torch.Tensor
    target: torch.Tensor

    def __post_init__(self) -> None:
        if self.source.nbytes != self.target.nbytes:
            raise PlanError(f"a move of {self.source.nbytes} bytes into {self.target.nbytes}")
        if not (self.source.is_contiguous() and self.target.is_contiguous()):
            raise PlanError("a move of a tensor that is not one run of bytes")


Copy = Transfer | Move


@dataclass(frozen=True, eq=False)
class Descriptors:
    """What a driver takes: addresses and bytes, int64, none empty, none over another."""

    sources: Offsets
    targets: Offsets
    sizes: Offsets

    def __len__(self) -> int:
        return len(self.sizes)

    def calls(self, most: int = MAX_DESCRIPTORS) -> Iterator[Descriptors]:
        """Cut into as many as one call takes."""
        for start in range(0, len(self), most):
            cut = slice(start, start + most)
            yield Descriptors(self.sources[cut], self.targets[cut], self.sizes[cut])


def descriptors(copies: Sequence[Copy], alignment: int = 1) -> Descriptors:
    """Check `copies`, which are to be one call, and return their descriptors.

    `alignment`: bytes on which every piece has to begin on both sides, and its size; 1 for drivers, 16 for kernels.

    Raises:
        PlanError: see `Transfer.check`; also two copies that write the same bytes, one that reads what another writes,
            or a piece off the alignment.
    """
    sources: list[Offsets] = []
    targets: list[Offsets] = []
    sizes: list[Offsets] = []
    moves = [copy for copy in copies if isinstance(copy, Move)]
    if moves:
        sources.append(np.array([move.source.data_ptr() for move in moves], dtype=np.int64))
        targets.append(np.array([move.target.data_ptr() for move in moves], dtype=np.int64))
        sizes.append(np.array([move.source.nbytes for move in moves], dtype=np.int64))
    for copy in copies:
        if isinstance(copy, Transfer):
            copy.check()
            plan = copy.plan.merged(copy.source.chunk_bytes, copy.target.chunk_bytes)
            sources.append(plan.sources + copy.source.address)
            targets.append(plan.targets + copy.target.address)
            sizes.append(plan.sizes)
    if not sizes:
        nothing = np.empty(0, dtype=np.int64)
        return Descriptors(nothing, nothing, nothing)
    found = CopyPlan(np.concatenate(sources), np.concatenate(targets), np.concatenate(sizes)).without_empty()
    names = ", ".join(sorted({str(copy) for copy in copies if isinstance(copy, Transfer)})) or "moves"
    _check_together(found, names)
    if alignment > 1:
        off = ((found.sources | found.targets | found.sizes) % alignment).nonzero()[0]
        if len(off):
            raise PlanError(f"piece {int(off[0])} of {names} does not lie on {alignment} bytes")
    return Descriptors(found.sources, found.targets, found.sizes)


def check_overlap(targets: Offsets, sizes: Offsets, what: str) -> None:
    """Raises PlanError: two pieces write the same byte."""
    order = np.argsort(targets, kind="stable")
    over = targets[order[1:]] < (targets + sizes)[order[:-1]]
    if over.any():
        at = int(np.argmax(over))
        raise PlanError(f"{what}: pieces {int(order[at])} and {int(order[at + 1])} write the same bytes")


def _check_together(plan: CopyPlan, what: str) -> None:
    """The pieces of one call run in any order, so none may write what another writes or reads."""
    if len(plan) == 0:
        return
    check_overlap(plan.targets, plan.sizes, what)
    order = np.argsort(plan.targets)
    starts, ends = plan.targets[order], (plan.targets + plan.sizes)[order]
    # Targets are disjoint, so the last one that begins before a source ends is the only one that may touch it.
    before = np.searchsorted(starts, plan.sources + plan.sizes, side="left") - 1
    touched = (before >= 0) & (ends[np.maximum(before, 0)] > plan.sources)
    if touched.any():
        reader = int(np.argmax(touched))
        raise PlanError(f"{what}: piece {reader} reads what piece {int(order[before[reader]])} writes")
