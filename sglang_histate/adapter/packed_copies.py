"""Copies of states that lie in slots of the device's pool, into encoded records, on a GPU.

The kernel reads the number of the slot where it is, so nothing is fetched first and the scheduler thread queues all of a
copy at once. The slot is held until the record has arrived, not only until it is packed: that is looked at once per
step on all ranks alike, and by the next step a record has arrived as well.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_histate.adapter.slot_copies import SlotCopies, SlotCopy
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.copy import CopyEngine
from sglang_histate.copy.kernels import Kernels, PoolTable
from sglang_histate.copy.ordering import Rule, StreamLane
from sglang_histate.copy.packing import Packing, RecordPacker
from sglang_histate.store import Record


class PackedCopies:
    """All copies of one rank's slots, as `SlotCopies`. Scheduler thread only."""

    def __init__(
        self,
        layout: StateLayout,
        temporal: torch.Tensor,
        conv: torch.Tensor,
        *,
        kernels: Kernels,
        engine: CopyEngine,
        records: int,
        forward_stream: Any,
        streams: Any = None,
    ) -> None:
        """`temporal` ``[L, slots, HV, V, K]`` and `conv` ``[L, slots, dim, W-1]`` are the device pool's tensors.

        `records`: how many buffers the store has. `streams` is `torch.cuda`, or what stands for it in tests.
        """
        self._lane = StreamLane(temporal.device, torch.cuda if streams is None else streams)
        self._forward_stream = forward_stream
        self._packer = RecordPacker(PoolTable(temporal, conv), layout.encoding, kernels, engine, self._lane)
        # A copy's flag has the place of its record: nobody else has that meanwhile.
        self._flags = torch.zeros(records, dtype=torch.int32, pin_memory=temporal.device.type == "cuda")

    def start(self, slot: torch.Tensor, record: Record) -> SlotCopy:
        """Begin to copy the state in `slot` ``[1]``, a row of the pool's tensors, to `record`."""
        flag = self._flags[record.buffer_id : record.buffer_id + 1]
        copy = SlotCopy(record, slot.to(torch.int64), flag=flag)
        # The state was written by the last forward pass, or by what the scheduler queued since; so was the number.
        self._lane.follow_current(Rule.INDEX)
        self._lane.follow(self._forward_stream, Rule.STATE)
        payload = torch.from_numpy(record.payload)[: self._packer.record_bytes]
        copy.mark = self._packer.send(copy.number, payload, flag)
        return copy

    def advance(self) -> None:
        """Nothing is put off: see `start`."""

    def drain(self) -> None:
        """Wait until all copies have arrived. For resets and the end."""
        self._lane.drain(Rule.QUIET)


def slot_copies(
    layout: StateLayout,
    temporal: torch.Tensor,
    conv: torch.Tensor,
    *,
    packing: Packing,
    engine: CopyEngine,
    records: int,
    records_pinned: bool,
    forward_stream: Any,
    streams: Any = None,
) -> SlotCopies | PackedCopies:
    """Return what copies slots to records: packed if there is something that packs."""
    if packing.kernels is not None:
        return PackedCopies(
            *(layout, temporal, conv),
            kernels=packing.kernels,
            engine=engine,
            records=records,
            forward_stream=forward_stream,
            streams=streams,
        )
    return SlotCopies(
        *(layout, temporal, conv),
        engine=engine,
        records=records,
        records_pinned=records_pinned,
        forward_stream=forward_stream,
        streams=streams,
    )
