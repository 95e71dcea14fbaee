"""How far a stored checkpoint is from the same state computed again, and how far it may be.

The measure is the relative L2 distance of a layer's temporal state, and of its convolution window. What it may come to:

- The same numbers computed in chunks of other lengths are added up in another order. On the CPU engine nothing changes
  by that. Where activations are float32, kernels may still multiply in fewer bits (2^-11 each for TF32): 2^-8. Where they
  are bf16 or fp16, each product is off by 2^-9 and layers pass it on: 2^-4.
- Both sides went through the store's encoding, and two numbers that are nearly equal may be rounded apart: twice its
  error. bf16 is off by 2^-9 of each number. int8 is off by half a step, 1/254 of the largest of the V numbers of a
  channel, whose norm is at least that largest one: sqrt(V)/254 at most.

A state of another position, layer or prompt is about 1.4 away, far beyond all of these. Single wrong bits are not what
this is for: checksums find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype

_FLOAT32_NOISE = 2.0**-8
_HALF_NOISE = 2.0**-4


@dataclass(frozen=True)
class Difference:
    """The part of a checkpoint that is furthest from what was computed, in units of what it may be."""

    layer_id: int
    part: str  # "state" or "window"
    relative: float  # L2; infinite where the numbers are not finite
    allowed: float

    @property
    def is_mismatch(self) -> bool:
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        return f"the {self.part} of layer {self.layer_id} is {self.relative:.3g} away, {self.allowed:.3g} is allowed"


def tolerances(layout: StateLayout) -> tuple[float, float]:
    """Return what the relative distance of a layer's temporal state and of its window may be."""
    # The window holds activations as they are.
    noise = _FLOAT32_NOISE if layout.conv_dtype is torch.float32 else _HALF_NOISE
    rounding = {
        CheckpointDtype.NATIVE: 0.0,
        CheckpointDtype.BF16: 2 * 2.0**-9,
        CheckpointDtype.INT8: 2 * layout.temporal_shape[-2] ** 0.5 / 254,
    }[layout.encoding]
    return noise + rounding, noise


def compare(layout: StateLayout, stored: Any, computed: Any) -> Difference:
    """Return the worst difference between the payloads (uint8) of two records. Any thread."""
    state_allowed, window_allowed = tolerances(layout)
    found = []
    layers = zip(layout.layer_ids, layout.record_views(stored), layout.record_views(computed), strict=True)
    for layer_id, mine, fresh in layers:
        states = []
        for parts in (mine.temporal, fresh.temporal):
            state = torch.empty(layout.temporal_shape, dtype=layout.temporal_dtype)
            layout.codec.decode(parts, state)
            states.append(state)
        found.append(Difference(layer_id, "state", _distance(*states), state_allowed))
        found.append(Difference(layer_id, "window", _distance(mine.conv, fresh.conv), window_allowed))
    return max(found, key=lambda one: one.relative / one.allowed)


def _distance(stored: torch.Tensor, computed: torch.Tensor) -> float:
    """Return the L2 distance relative to `computed`; of two zeros it is 0."""
    wanted = computed.to(torch.float64)
    apart, size = (
        torch.linalg.vector_norm(stored.to(torch.float64) - wanted),
        torch.linalg.vector_norm(wanted),
    )
    if not torch.isfinite(apart) or not torch.isfinite(size):
        return float("inf")
    if apart == 0:
        return 0.0
    return float(apart / size) if size > 0 else float("inf")
