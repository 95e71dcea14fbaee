"""The states in a slab file, decoded: what a server would restore, without the server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.store.blocks import SlabHeader, Superblock
from sglang_histate.store.kinds import RecordKind
from sglang_histate.store.layout import SUPERBLOCK_BYTES


class StatesError(RuntimeError):
    """The file is no slab file, or the checkpoint that was to be in it is not."""


@dataclass(frozen=True)
class Stored:
    """One checkpoint: temporal states ``[L, HV, V, K]`` as they decode, and the bytes it takes on the SSD."""

    states: torch.Tensor
    size_bytes: int


def newest(ssd_dir: Path, position: int) -> Stored:
    """Return the checkpoint at token `position` that was written last below `ssd_dir`.

    Raises:
        StatesError: see there.
    """
    files = sorted(ssd_dir.glob("*/*/slabs.dat"))
    if len(files) != 1:
        raise StatesError(f"{ssd_dir} holds {len(files)} slab files, one was expected")
    with files[0].open("rb") as file:
        block = Superblock.parse(file.read(SUPERBLOCK_BYTES))
        if block is None:
            raise StatesError(f"{files[0]} has no superblock of this version")
        best: tuple[int, int] | None = None  # generation, slab
        for slab in range(block.slab_count):
            file.seek(SUPERBLOCK_BYTES + slab * block.slab_bytes)
            header = SlabHeader.parse(file.read(block.header_bytes))
            if header is None or header.kind is not RecordKind.CHECKPOINT or header.at_token != position:
                continue
            if best is None or header.generation > best[0]:
                best = header.generation, slab
        if best is None:
            raise StatesError(f"{files[0]} has no checkpoint at token {position}")
        file.seek(SUPERBLOCK_BYTES + best[1] * block.slab_bytes + block.header_bytes)
        payload = np.frombuffer(bytearray(file.read(block.payload_bytes)), dtype=np.uint8)
    layout = layout_of(block)
    states = torch.empty(len(layout.layer_ids), *layout.temporal_shape, dtype=layout.temporal_dtype)
    for out, encoded in zip(states, layout.record_views(payload), strict=True):
        layout.codec.decode(encoded.temporal, out)
    return Stored(states, layout.stored_bytes)


def layout_of(block: Superblock) -> StateLayout:
    """Return how the records of a store lie, from the identity in its superblock.

    Raises:
        StatesError: the identity is too long for the block.
    """
    if block.fingerprint_json_bytes > len(block.fingerprint_json):
        raise StatesError("the store's identity is longer than what its superblock keeps of it")
    facts = json.loads(block.fingerprint_json)["identity"]["state"]
    return StateLayout(
        layer_ids=tuple(facts["layer_ids"]),
        temporal_shape=tuple(facts["temporal_shape"]),
        temporal_dtype=_dtype(facts["temporal_dtype"]),
        conv_shape=tuple(facts["conv_shape"]),
        conv_dtype=_dtype(facts["conv_dtype"]),
        encoding=CheckpointDtype(facts["encoding"]),
    )


def relative_error(states: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the L2 norm of the difference over that of `exact`, all layers together."""
    return float(torch.linalg.vector_norm(states - exact) / torch.linalg.vector_norm(exact))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise StatesError(f"{name} is no dtype")
    return found
