"""Copies of states that lie in slots of the device's pool, into records.

On CUDA the number of a slot is only known there: it is fetched first, and the copy is queued in a later step, when it has
come. The scheduler thread never waits for either. Without a GPU a copy is done when `start` returns, but for encodings,
which are made on a thread. Encoded records on CUDA have a way of their own, see `packed_copies`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_histate.adapter.state_face import pool_parts
from sglang_histate.adapter.state_layout import RecordViews, StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import CopyEngine, CopyError, Move, Space, host_engine
from sglang_histate.copy.checkpoints import GROUP_LAYERS, CheckpointPlans, Direction, layer_groups
from sglang_histate.copy.kernels import NO_SUCH_SLOT
from sglang_histate.copy.ordering import REACHED, InlineLane, Lane, Mark, Rule, StreamLane, ThreadLane
from sglang_histate.store import Record


@dataclass(eq=False)
class SlotCopy:
    """One copy. Its slot must neither be written nor moved before it has `arrived`."""

    record: Record
    number: torch.Tensor  # the slot's number on the device, kept until it has been fetched
    fetched: Mark | None = None
    index: int = 0  # of the host number that it is fetched into
    mark: Mark | None = None
    flag: torch.Tensor | None = None  # int32 [1] on the host: what `pack` found, once it has arrived

    @property
    def immediate(self) -> bool:
        """Whether it was done when it was begun: a question of the device and the encoding, alike on all ranks."""
        return self.mark is REACHED

    @property
    def arrived(self) -> bool:
        """Whether the bytes are in the record. What went wrong on a thread is raised here."""
        return self.mark is not None and self.mark.reached(Rule.HANDOVER)

    def hand_over(self) -> None:
        """The record has arrived and goes to the store. What `pack` found wrong with it keeps it from being stored.

        The store looks at the bytes itself before it writes or lends them, whoever filled the record. The flag comes on
        top: it was set where the state is, so it holds even if the bytes that came say otherwise.

        Raises:
            CopyError: the slot was none of the pool's, and the record may hold another one's state.
        """
        found = 0 if self.flag is None else int(self.flag[0])
        if found & NO_SUCH_SLOT:
            raise CopyError("a state was to be copied from a slot that the device's pool does not have")
        if found:
            self.record.sound = False


class SlotCopies:
    """All copies of one rank's slots. Scheduler thread only."""

    def __init__(
        self,
        layout: StateLayout,
        temporal: torch.Tensor,
        conv: torch.Tensor,
        *,
        engine: CopyEngine | None = None,
        records: int = 1,
        records_pinned: bool = True,
        forward_stream: Any = None,
        streams: Any = None,
    ) -> None:
        """`temporal` ``[L, slots, HV, V, K]`` and `conv` ``[L, slots, dim, W-1]`` are the device pool's tensors.

        `records`: how many copies there can be at once. `streams` is `torch.cuda` on a GPU, or what stands for it.
        """
        self._layout = layout
        self._temporal, self._conv = temporal, conv
        self._engine = host_engine() if engine is None else engine
        self._records_pinned = records_pinned
        self._forward_stream = forward_stream
        on_cuda = temporal.device.type == "cuda"
        if streams is None and on_cuda:
            streams = torch.cuda
        assert streams is None or layout.encoding is CheckpointDtype.NATIVE, "see PackedCopies"
        self._fetch: StreamLane | None = None
        self._stream: StreamLane | None = None
        self._lane: Lane
        if streams is not None:
            self._fetch, self._stream = (
                StreamLane(temporal.device, streams),
                StreamLane(temporal.device, streams),
            )
            self._lane = self._stream
            self._numbers = torch.zeros(records, dtype=torch.int64, pin_memory=on_cuda)
        elif layout.encoding is CheckpointDtype.NATIVE:
            self._lane = InlineLane()
        else:
            self._lane = ThreadLane("histate-encode-ends")
        self._free = list(range(records))
        self._fetching: deque[SlotCopy] = deque()  # the oldest first
        # A driver gets a few layers in one call; plain copies need no groups.
        self._groups = layer_groups(len(temporal), GROUP_LAYERS if streams is not None else len(temporal))
        if layout.encoding is CheckpointDtype.NATIVE:
            parts = pool_parts(temporal, conv, layout.record_segment_bytes, layout.record_conv_offset)
            self._plans = CheckpointPlans(parts, page_bytes=len(temporal) * layout.record_segment_bytes)

    def start(self, slot: torch.Tensor, record: Record) -> SlotCopy:
        """Begin to copy the state in `slot` ``[1]``, a row of the pool's tensors, to `record`."""
        copy = SlotCopy(record, slot)
        if self._fetch is None or self._stream is None:
            self._copy(copy, int(slot[0]))
            return copy
        copy.number = slot.to(torch.int64)
        copy.index = self._free.pop()
        there = self._numbers[copy.index : copy.index + 1]
        self._fetch.follow_current(Rule.INDEX)
        self._fetch.run(lambda: self._engine.submit([Move(copy.number, there)]))
        copy.fetched = self._fetch.mark()
        # The state was written by the last forward pass, or by what the scheduler queued since. That is done once the
        # number has come, as the number was fetched behind it.
        self._stream.follow(self._forward_stream, Rule.STATE)
        self._fetching.append(copy)
        return copy

    def advance(self) -> None:
        """Queue the copies whose slots are known by now. Never waits."""
        while self._fetching:
            copy = self._fetching[0]
            assert copy.fetched is not None
            if not copy.fetched.reached(Rule.INDEX_READ):
                return
            self._fetching.popleft()
            self._free.append(copy.index)
            self._copy(copy, int(self._numbers[copy.index]))

    def drain(self) -> None:
        """Wait until all copies have arrived. For resets and the end."""
        if self._fetch is not None:
            self._fetch.drain(Rule.QUIET)
            self.advance()
        self._lane.drain(Rule.QUIET)

    def _copy(self, copy: SlotCopy, row: int) -> None:
        """Queue the copy, a few layers in one call to the driver."""
        if self._layout.encoding is CheckpointDtype.NATIVE:
            host = Space("a record", torch.from_numpy(copy.record.payload), pinned=self._records_pinned)
            start, rows = np.zeros((1, 1), dtype=np.int64), np.array([row], dtype=np.int64)
            for group in self._groups:
                transfers = self._plans.transfers(host, start, rows, group, Direction.TO_HOST)
                self._run(transfers)
        else:
            views = self._layout.record_views(copy.record.payload)
            self._lane.run(lambda: self._encode(row, views))
        copy.mark = self._lane.mark()

    def _run(self, copies: Sequence[Any]) -> None:
        self._lane.run(lambda: self._engine.submit(copies))

    def _encode(self, row: int, views: Sequence[RecordViews]) -> None:
        moves = []
        for temporal, conv, places in zip(self._temporal, self._conv, views, strict=True):
            moves += self._layout.encoded(temporal[row : row + 1], conv[row], places)
        self._engine.submit(moves)
