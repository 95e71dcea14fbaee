"""Encoded records of slots on a GPU: packed there, then copied as one run of bytes.

A slot's state lies in two pieces a layer, and torch would encode it in some dozens of launches. `pack` reads it once and
writes the whole record beside it on the device; what crosses the link is a half or a quarter of the state, in one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.engine import CopyEngine
from sglang_histate.copy.kernels import Kernels, PoolTable, load
from sglang_histate.copy.ordering import Mark, StreamLane
from sglang_histate.copy.transfer import Move

PIECE_BYTES = 6 << 20
"""In one call to the driver, as in three layers of a native record: small copies of others get their turn between."""


@dataclass(frozen=True)
class Packing:
    """What packs records on a device, and why that. `kernels` is None where nothing is packed."""

    name: str
    reason: str
    kernels: Kernels | None = None

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "reason": self.reason}

    @property
    def is_slow(self) -> bool:
        """Whether records are packed, but not by the kernels made for it."""
        return self.kernels is not None and self.name == "torch"


def choose_packing(device: torch.device, encoding: CheckpointDtype) -> Packing:
    """Return what packs records of `encoding` on `device`. For the start: kernels may be compiled and are tried."""
    if device.type != "cuda":
        return Packing("none", f"states are encoded by a thread where they are on {device.type}")
    if encoding is CheckpointDtype.NATIVE:
        return Packing("none", "native checkpoints are copied as they are")
    kernels = load(device)
    return Packing(kernels.name, kernels.reason, kernels)


class RecordPacker:
    """Packs slots of `pool`, one after the other, and copies each to the host. All of it on `lane`.

    There is one record of device memory, allocated once. One lane does both, so a record is packed behind the copy of
    the one before, and there is no wait that could be missing.
    """

    def __init__(
        self,
        pool: PoolTable,
        encoding: CheckpointDtype,
        kernels: Kernels,
        engine: CopyEngine,
        lane: StreamLane,
    ) -> None:
        self._pool = pool
        self._encoding = encoding
        self._kernels = kernels
        self._engine = engine
        self._lane = lane
        self.record_bytes = pool.form(encoding).record_bytes
        self._staged = torch.empty((1, self.record_bytes), dtype=torch.uint8, device=pool.device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=pool.device)

    def send(self, slot: torch.Tensor, payload: torch.Tensor, flag: torch.Tensor) -> Mark:
        """Queue the way of the state in `slot` (int64 ``[1]`` on the device) to `payload` (uint8 ``[record_bytes]``).

        `flag` (int32 ``[1]``, on the host too) comes with it: what `Kernels.pack` says of the record. The lane must
        follow who wrote slot and state, and `slot` must stay until the mark that is returned is reached.
        """
        self._lane.run(lambda: self._pack(slot))
        pieces = zip(self._staged[0].split(PIECE_BYTES), payload.split(PIECE_BYTES), strict=True)
        moves = [[Move(source, target)] for source, target in pieces]
        moves[-1].append(Move(self._flag, flag))
        for call in moves:
            self._lane.run(lambda call=call: self._engine.submit(call))  # type: ignore[misc]
        return self._lane.mark()

    def _pack(self, slot: torch.Tensor) -> None:
        self._kernels.pack(self._pool, slot, self._staged, self._encoding, flags=self._flag)
