"""Slots of the host arena's state face: where a checkpoint lands on its way from the SSD to the device."""

from __future__ import annotations

from typing import Any

import torch

from sglang_histate.adapter.mamba_component import HiStateMambaComponent
from sglang_histate.adapter.state_face import StateFace
from sglang_histate.adapter.state_layout import StateLayout


class HostSlots:
    """What fault-ins need of the state face. A slot is an index tensor of length 1."""

    def __init__(self, component: HiStateMambaComponent, layout: StateLayout) -> None:
        face: Any = component._mamba_pool_host
        assert isinstance(face, StateFace) and face.size_per_token == layout.record_layout().payload_bytes
        self._component = component
        self._face = face

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

    def fill(self, slot: torch.Tensor, payload: Any) -> None:
        """Copy a record's payload into `slot`. Safe on any thread while the slot is held."""
        self._face.fill(int(slot[0]), payload)
