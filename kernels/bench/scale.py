"""How large everything is: a model's states on a GPU, or next to nothing in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.checkpoints import GROUP_LAYERS as GROUP_LAYERS  # 6.1 MiB of Qwen3.5-9B

from ..table import PoolTable
from .device import Device, Table

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes in bytes unless they say otherwise. The defaults are Qwen3.5-9B on one GPU."""

    layers: int = 24
    slots: int = 16
    heads: int = 32
    conv: tuple[int, int] = (8192, 3)
    counts: tuple[int, ...] = (1, 2, 4, 8)
    blocks: tuple[int, ...] = (2, 4, 8)
    repeats: int = 30
    warmups: int = 5
    link_sizes: tuple[int, ...] = (64 << 10, MIB, 2 * MIB, 6 * MIB, 48 * MIB, 256 * MIB)
    matrix: int = 8192
    memory_bytes: int = 1 << 30
    graph_layers: int = 32
    graph_width: int = 4096
    load_s: float = 0.8
    probes: int = 150
    fragments: tuple[int, ...] = tuple(kib << 10 for kib in (2, 4, 8, 16, 24, 32, 64, 128, 256))
    fragment_counts: tuple[int, ...] = (16, 64, 256, 1024)
    fragment_repeats: int = 10
    disk_records: int = 6


DRY = Scale(
    layers=4,
    slots=6,
    heads=1,
    conv=(40, 3),
    counts=(1, 2),
    blocks=(2,),
    repeats=2,
    warmups=1,
    link_sizes=(4 << 10, 64 << 10),
    matrix=64,
    memory_bytes=1 << 20,
    graph_layers=2,
    graph_width=32,
    load_s=0.01,
    probes=2,
    fragments=(2 << 10, 16 << 10),
    fragment_counts=(4, 16),
    fragment_repeats=2,
    disk_records=2,
)


class States:
    """A pool of random states, and the copies that make a native record of a slot or a slot of a record."""

    def __init__(self, device: Device, scale: Scale) -> None:
        self.scale = scale
        rows = (scale.heads, 128, 128)
        self.pool = PoolTable(
            device.random(scale.layers, scale.slots, *rows),
            device.random(scale.layers, scale.slots, *scale.conv, dtype=torch.bfloat16),
        )
        self.form = self.pool.form(CheckpointDtype.NATIVE)
        self.record_bytes = self.form.record_bytes

    def size_of(self, encoding: CheckpointDtype) -> int:
        return self.pool.form(encoding).record_bytes

    def pieces(self, slot: int, record: torch.Tensor, layers: range) -> list[tuple[int, int, int]]:
        """Return (address in the record, address in the slot, bytes) of all pieces of those layers."""
        found = []
        for layer in layers:
            at = record.data_ptr() + layer * self.form.segment_bytes
            temporal, conv = self.pool.temporal[layer, slot], self.pool.conv[layer, slot]
            found.append((at, temporal.data_ptr(), temporal.nbytes))
            found.append((at + self.form.part_offsets[-1], conv.data_ptr(), conv.nbytes))
        return found

    def tables(
        self, slots: range, records: torch.Tensor, *, to_host: bool, group: int | None = None
    ) -> list[Table]:
        """Return the copies of ``slots[i]`` and ``records[i]``: one table, or one per record and group of layers."""
        everything = range(self.scale.layers)
        groups = [everything]
        if group:
            groups = [everything[start : start + group] for start in range(0, self.scale.layers, group)]
        pairs = list(zip(slots, records, strict=True))
        tables = [[self.pieces(slot, record, part) for part in groups] for slot, record in pairs]
        turned = [
            [[piece if to_host else (piece[1], piece[0], piece[2]) for piece in part] for part in of_record]
            for of_record in tables
        ]
        if group:
            return [Table(part) for of_record in turned for part in of_record]
        return [Table([piece for of_record in turned for part in of_record for piece in part])]

    def same(self, slots: range, others: range) -> bool:
        """Return whether the states in two lists of slots are equal, bit for bit."""
        pool = self.pool
        return torch.equal(
            pool.temporal[:, list(slots)].view(torch.int32), pool.temporal[:, list(others)].view(torch.int32)
        ) and torch.equal(
            pool.conv[:, list(slots)].view(torch.int16), pool.conv[:, list(others)].view(torch.int16)
        )

    def poison(self, slots: range) -> None:
        self.pool.temporal[:, list(slots)] = -7.0
        self.pool.conv[:, list(slots)] = -7.0
