"""Slots of the host arena's state face: where a checkpoint lands on its way from the SSD to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_histate.adapter.mamba_component import HiStateMambaComponent
from sglang_histate.adapter.state_face import StateFace
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import Move


class HostSlots:
    """What fault-ins need of the state face. A slot is an index tensor of length 1."""

    def __init__(self, component: HiStateMambaComponent, layout: StateLayout) -> None:
        face: Any = component._mamba_pool_host
        assert isinstance(face, StateFace) and face.size_per_token == layout.image_bytes
        self._component = component
        self._face = face
        self._layout = layout
        self._engine = face.shared.host_engine

    @property
    def total(self) -> int:
        """Slots that the arena could hold if it held nothing else."""
        return self._face.size

    def alloc(self) -> torch.Tensor | None:
        """Return one free slot; where there is no room, something on the host side of the tree is evicted first."""
        return self._face.alloc(1)

    def free(self, slot: torch.Tensor) -> None:
        self._component.free_host_slot(slot)

    def drop_loaded(self, node_id: Any) -> None:
        """Free a node's host state if it is on the device too."""
        self._component.drop_loaded_host_state(node_id)

    def fill(self, slot: torch.Tensor, payload: Any, layers: range) -> None:
        """Copy some layers of a record's payload into `slot`, decoded. Safe on any thread while the slot is held."""
        layout, index = self._layout, int(slot[0])
        size = layout.segment_bytes
        if layout.encoding is CheckpointDtype.NATIVE:
            start = layers.start * size
            self._face.fill(index, payload[start : layers.stop * size], start)
            return
        segment = np.zeros(size, dtype=np.uint8)
        (decoded,) = layout.views(segment)
        views = layout.record_views(payload)
        for layer in layers:
            encoded = views[layer]
            layout.codec.decode(encoded.temporal, decoded.temporal)
            self._engine.submit([Move(encoded.conv, decoded.conv)])
            self._face.fill(index, segment, layer * size)

    def read_into(self, slot: torch.Tensor, payload: Any) -> None:
        """Copy the state in `slot` into a record's payload, encoded."""
        layout = self._layout
        if layout.encoding is CheckpointDtype.NATIVE:
            self._face.read_into(int(slot[0]), payload)
            return
        image = self._face.read(int(slot[0]))
        for state, encoded in zip(layout.views(image), layout.record_views(payload), strict=True):
            self._engine.submit(layout.encoded(state.temporal[None], state.conv, encoded))
