"""A ring of device memory in which captured states wait for their copy to the host.

What a layer produces is overwritten soon after. Fresh memory for each would hold as much as the copies are behind, beside
a model that has been given nearly all there is; the ring holds what it was made with. Where it is full, the stream that
produces states waits for the oldest copy: that is a wait of a stream, not of a thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod

import torch

from sglang_histate.copy.ordering import EventMark, Rule, StreamLane

_ALIGNMENT_BYTES = 256


@dataclass(eq=False)
class _Block:
    start: int
    end: int
    mark: EventMark | None = None  # None: its copy is not queued yet


class StagingRing:
    """`memory`: uint8 ``[bytes]`` on the device, allocated once. Blocks are given out in a circle.

    `take` -> the current stream writes the block, `lane` copies it -> `seal` once that is queued.
    """

    def __init__(self, memory: torch.Tensor, lane: StreamLane) -> None:
        self._memory = memory
        self._lane = lane
        self._blocks: deque[_Block] = deque()  # the oldest first
        self._next = 0

    @property
    def size_bytes(self) -> int:
        return self._memory.numel()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a block for the current stream to write to; None if copies that are not queued yet are in the way.

        Raises:
            ValueError: it is larger than the ring.
        """
        size = prod(shape) * dtype.itemsize
        if size > self.size_bytes:
            raise ValueError(f"{size} bytes to stage in a ring of {self.size_bytes}")
        start = self._next if self._next + size <= self.size_bytes else 0
        end = start + size
        in_the_way = [i for i, block in enumerate(self._blocks) if block.start < end and start < block.end]
        if in_the_way:
            # Copies are made in order, so the last one in the way stands for all before it.
            mark = self._blocks[in_the_way[-1]].mark
            if mark is None:
                return None
            self._lane.hold_current(mark, Rule.RESTAGE)
            for _ in range(in_the_way[-1] + 1):
                self._blocks.popleft()
        self._blocks.append(_Block(start, end))
        self._next = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._memory[start:end].view(dtype).view(shape)

    def rows_per_block(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return how many rows a block may have so that two fit: one is written while the other is copied."""
        most = self.size_bytes // 2 // (prod(row_shape) * dtype.itemsize)
        assert most > 0, f"a ring of {self.size_bytes} bytes for rows of {row_shape}"
        return most

    def fill(
        self, block: torch.Tensor, source: torch.Tensor, part: slice, rows: torch.Tensor | None = None
    ) -> None:
        """Write ``source[rows[part]]``, or ``source[part]``, to `block` on the current stream."""
        if rows is None:
            block.copy_(source[part])
        elif source.dtype is block.dtype:
            torch.index_select(source, 0, rows[part], out=block)
        else:
            block.copy_(source.index_select(0, rows[part]))

    def seal(self, mark: EventMark) -> None:
        """The copies of all blocks so far are queued before `mark`."""
        for block in reversed(self._blocks):
            if block.mark is not None:
                break
            block.mark = mark

    def reset(self) -> None:
        """All copies are done."""
        self._blocks.clear()


def ring_bytes(checkpoint_bytes: int, checkpoints: int) -> int:
    """Return a size for a ring that holds `checkpoints`."""
    return checkpoint_bytes * checkpoints + _ALIGNMENT_BYTES
