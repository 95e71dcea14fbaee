"""The way of captured states from the device into host records, beside the forward pass.

On CUDA what a layer produced is gathered into a ring of device memory, and a lane of its own encodes and copies it while
later layers run; the forward stream waits only where the ring is full. It encodes with torch, not with `pack`, which
takes states and windows from the same rows of one pool: here they come one after the other, from different rows. On the
CPU engine a copy is a plain one, and states that are not stored as they are go through a thread, which encodes all of a
forward pass once it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import CopyEngine, Move, TemporalCodec, host_engine
from sglang_histate.copy.checkpoints import GROUP_LAYERS
from sglang_histate.copy.ordering import REACHED, Mark, Rule, StreamLane, ThreadLane, Work
from sglang_histate.copy.staging import StagingRing

Targets = Sequence[torch.Tensor]


class LayerEgress:
    """Copies ``source[rows[i]]`` into the i-th target; `mark` tells when everything so far has arrived."""

    def __init__(
        self,
        device: torch.device,
        codec: TemporalCodec,
        engine: CopyEngine | None = None,
        *,
        stage_bytes: int = 0,
        streams: Any = None,
    ) -> None:
        """`codec` is the encoding of the temporal states, `engine` moves bytes between device and host.

        `stage_bytes`: size of the ring on a CUDA device. `streams` is `torch.cuda` there, or what stands for it in tests.
        """
        self._codec = codec
        self._engine = host_engine() if engine is None else engine
        if streams is None and device.type == "cuda":
            streams = torch.cuda
        self._stream: StreamLane | None = None
        self._thread: ThreadLane | None = None
        self._group: list[Work] = []  # of the layers since the last call to the driver
        self._moves: list[Move] = []
        self._layers = 0
        if streams is not None:
            self._stream = StreamLane(device, streams)
            memory = torch.empty(stage_bytes, dtype=torch.uint8, device=device)
            self._ring = StagingRing(memory, self._stream)
        elif codec.encoding is not CheckpointDtype.NATIVE:
            self._thread = ThreadLane("histate-encode")

    def windows(
        self, raw_inputs: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, targets: Targets
    ) -> None:
        """Take n windows of `rows` ``[n, W-1]`` out of ``[T, dim]``, each into a target ``[dim, W-1]`` of `dtype`."""
        gathered = raw_inputs[rows].transpose(1, 2).to(dtype)
        if self._stream is None:
            self._copy(gathered.contiguous(), targets)
            return
        for first, staged in self._staged(gathered):
            self._moves += map(Move, staged, targets[first : first + len(staged)])

    def states(
        self,
        source: torch.Tensor,
        rows: torch.Tensor,
        dtype: torch.dtype,
        targets: Sequence[Targets],
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Encode temporal states ``source[rows]`` ``[n, HV, V, K]`` of `dtype`, each into the parts of one of n records.

        `numbers`: the rows as numbers, where the caller has them on the host.
        """
        if self._stream is not None:
            for first, staged in self._staged(source, rows, dtype):
                self._encode_later(staged, targets[first : first + len(staged)])
        elif self._thread is not None:
            gathered = source.index_select(0, rows).to(dtype)
            self._thread.run(lambda: self._encode(gathered, targets))
        else:
            numbers = rows.tolist() if numbers is None else numbers
            whole = source if source.dtype is dtype else source.to(dtype)
            self._engine.submit(
                [Move(whole[row], part) for row, (part,) in zip(numbers, targets, strict=True)]
            )

    def layer_ends(self) -> None:
        """A layer has been taken. The driver is called once for some of them."""
        self._layers += 1
        if self._stream is not None and self._layers >= GROUP_LAYERS:
            self._send()

    def mark(self) -> Mark:
        """Return a mark behind all copies so far."""
        if self._thread is not None:
            return self._thread.mark()
        if self._stream is None:
            return REACHED
        self._send()
        return self._stream.mark()

    def drain(self) -> None:
        """Wait until all copies so far have arrived. For `/flush_cache` and the end, when the server is idle."""
        if self._thread is not None:
            self._thread.drain(Rule.QUIET)
        if self._stream is not None:
            self._group, self._moves, self._layers = [], [], 0
            self._stream.drain(Rule.QUIET)
            self._ring.reset()

    def _staged(
        self, source: torch.Tensor, rows: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Yield (first, block): `source[rows]`, or all of `source`, in the ring, in as many blocks as it takes."""
        count = len(source) if rows is None else len(rows)
        dtype = source.dtype if dtype is None else dtype
        row_shape = tuple(source.shape[1:])
        most = self._ring.rows_per_block(row_shape, dtype)
        for first in range(0, count, most):
            part = slice(first, min(first + most, count))
            shape = (part.stop - first, *row_shape)
            block = self._ring.take(shape, dtype)
            if block is None:
                self._send()  # what is in the way is waiting to be copied
                block = self._ring.take(shape, dtype)
            assert block is not None
            self._ring.fill(block, source, part, rows)
            yield first, block

    def _encode_later(self, states: torch.Tensor, targets: Sequence[Targets]) -> None:
        if self._codec.encoding is CheckpointDtype.NATIVE:
            self._moves += [Move(state, part) for state, (part,) in zip(states, targets, strict=True)]
        else:
            self._group.append(lambda: self._encode(states, targets))

    def _send(self) -> None:
        """Queue the group's copies behind what produced them."""
        assert self._stream is not None
        if self._moves or self._group:
            moves, self._moves = self._moves, []
            works, self._group = self._group, []
            self._stream.follow_current(Rule.STATE)
            if moves:
                self._stream.run(lambda: self._engine.submit(moves))
            for work in works:
                self._stream.run(work)
            self._ring.seal(self._stream.mark())
        self._layers = 0

    def _copy(self, source: torch.Tensor, targets: Targets) -> None:
        self._engine.submit([Move(row, target) for row, target in zip(source, targets, strict=True)])

    def _encode(self, states: torch.Tensor, targets: Sequence[Targets]) -> None:
        by_record = zip(*(part.unbind(0) for part in self._codec.encode(states)), strict=True)
        self._engine.submit(
            [
                Move(part, place)
                for parts, target in zip(by_record, targets, strict=True)
                for part, place in zip(parts, target, strict=True)
            ]
        )
