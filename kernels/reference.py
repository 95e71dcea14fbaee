"""`pack` and `unpack` in torch, on any device: the oracle of the kernels and what serves where they cannot be had.

The numbers are those of `copy.encoding`; this adds where they lie, the flags, and one record for many slots.
"""

from __future__ import annotations

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.encoding import INT8_LARGEST, Part

from .face import NO_SUCH_SLOT, NOT_FINITE, Kernels
from .table import PoolTable, RecordForm


class TorchKernels(Kernels):
    """Some dozens of launches per layer, and temporary tensors of one layer's size per slot."""

    def __init__(self, reason: str) -> None:
        super().__init__("torch", reason)

    def _pack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        flags: torch.Tensor,
        most_blocks: int,
    ) -> None:
        slots = slots.to(pool.device, non_blocking=True)
        there = (slots >= 0) & (slots < pool.slots)
        slots = torch.where(there, slots, 0)
        finite = torch.ones(len(slots), dtype=torch.bool, device=pool.device)
        for layer in range(pool.layers):
            parts = form.codec.encode(pool.temporal[layer].index_select(0, slots))
            window = pool.conv[layer].index_select(0, slots)
            finite &= _finite(_decoded_extremes(form, parts)) & _finite(window)
            start = layer * form.segment_bytes
            ends = (*form.part_offsets[1:], form.segment_bytes)
            for part, offset, end in zip((*parts, window), form.part_offsets, ends, strict=True):
                size = part[0].numel() * part.dtype.itemsize
                target = records[:, start + offset : start + end]
                target[:, :size].copy_(_bytes_of(part), non_blocking=True)
                target[:, size:].zero_()
        wrong = torch.where(there, (~finite).to(torch.int32) * NOT_FINITE, NO_SUCH_SLOT)
        flags.copy_(wrong, non_blocking=True)

    def _unpack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        sources: list[int],
        layers: range,
        most_blocks: int,
    ) -> None:
        targets: list[tuple[int, torch.Tensor | int]]
        if slots.device.type == "cpu":
            targets = list(zip(sources, slots.tolist(), strict=True))
        else:
            targets = list(zip(sources, slots.split(1), strict=True))
        *part_offsets, conv_offset = form.part_offsets
        window = Part(tuple(pool.conv.shape[2:]), pool.conv.dtype)
        state = torch.empty(pool.temporal.shape[2:], dtype=pool.temporal.dtype, device=pool.device)
        for source in dict.fromkeys(sources):
            record = records[source]
            for layer in layers:
                start = layer * form.segment_bytes
                parts = [
                    _view(record, start + offset, part).to(pool.device, non_blocking=True)
                    for part, offset in zip(form.codec.parts, part_offsets, strict=True)
                ]
                form.codec.decode(parts, state)
                conv = _view(record, start + conv_offset, window).to(pool.device, non_blocking=True)
                for of, slot in targets:
                    if of != source:
                        continue
                    if isinstance(slot, int):
                        pool.temporal[layer, slot].copy_(state)
                        pool.conv[layer, slot].copy_(conv)
                    else:  # the device knows which
                        pool.temporal[layer].index_copy_(0, slot, state[None])
                        pool.conv[layer].index_copy_(0, slot, conv[None])


def _decoded_extremes(form: RecordForm, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return numbers ``[n, ...]`` that are finite if all that `parts` decode to is."""
    return parts[1] * INT8_LARGEST if form.codec.encoding is CheckpointDtype.INT8 else parts[0]


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    """Return for each of ``[n, ...]`` whether all its numbers are finite, without waiting for the device."""
    return torch.isfinite(numbers.flatten(1)).all(dim=1)


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().flatten(1).view(torch.uint8)


def _view(record: torch.Tensor, start: int, part: Part) -> torch.Tensor:
    return record[start : start + part.size_bytes].view(part.dtype).view(part.shape)
