"""How far two states may be apart: what encodings and other orders of summing change is allowed, a wrong state is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_histate.adapter.state_compare import compare, tolerances
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype

SHAPE = (4, 128, 64)  # heads, V, K
NATIVE, BF16, INT8 = CheckpointDtype


def layout(encoding: CheckpointDtype, conv_dtype: torch.dtype = torch.bfloat16) -> StateLayout:
    return StateLayout((3, 5), SHAPE, torch.float32, (96, 3), conv_dtype, encoding)


def states(seed: int) -> list[torch.Tensor]:
    """Heavy-tailed numbers, as recurrent states have."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=source) ** 3 for _ in range(2)]


def payload(layout: StateLayout, temporal: list[torch.Tensor], conv: float = 1.0) -> np.ndarray:
    found = np.zeros(layout.record_layout().payload_bytes, dtype=np.uint8)
    for views, state in zip(layout.record_views(found), temporal, strict=True):
        for target, part in zip(views.temporal, layout.codec.encode(state[None]), strict=True):
            target.copy_(part[0])
        views.conv.fill_(conv)
    return found


def noisy(temporal: list[torch.Tensor], relative: float) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(99)
    found = []
    for state in temporal:
        noise = torch.randn(SHAPE, generator=source)
        found.append(state + noise * relative * state.norm() / noise.norm())
    return found


@pytest.mark.parametrize("encoding", CheckpointDtype)
@pytest.mark.parametrize("conv_dtype", [torch.float32, torch.bfloat16])
def test_noise_of_computing_passes_in_every_encoding(encoding, conv_dtype) -> None:
    made = layout(encoding, conv_dtype)
    relative = 0.9 * (2**-8 if conv_dtype is torch.float32 else 2**-4)
    found = compare(made, payload(made, states(1)), payload(made, noisy(states(1), relative)))
    assert found.part == "state" and not found.is_mismatch and found.relative > 0


@pytest.mark.parametrize("encoding", CheckpointDtype)
def test_a_wrong_state_does_not(encoding) -> None:
    made = layout(encoding)
    right = payload(made, states(1))
    swapped_layers = payload(made, states(1)[::-1])
    other_prompt = payload(made, states(2))
    flipped_signs = payload(made, [states(1)[0], -states(1)[1]])
    transposed_heads = payload(made, [state.flip(0) for state in states(1)])
    for wrong in (swapped_layers, other_prompt, flipped_signs, transposed_heads):
        assert compare(made, wrong, right).is_mismatch and compare(made, wrong, right).relative > 1
    assert compare(made, flipped_signs, right).layer_id == 5
    assert "the state of layer 5 is 2 away" in str(compare(made, flipped_signs, right))


def test_the_same_record_is_no_distance_away() -> None:
    for encoding in CheckpointDtype:
        made = layout(encoding)
        assert compare(made, payload(made, states(1)), payload(made, states(1))).relative == 0
    zeros = payload(made, [torch.zeros(SHAPE)] * 2, 0.0)
    assert compare(made, zeros, zeros).relative == 0
    assert compare(made, payload(made, states(1)), zeros).is_mismatch


def test_windows_count_too() -> None:
    made = layout(NATIVE)
    found = compare(made, payload(made, states(1), 2.0), payload(made, states(1), 1.0))
    assert found.is_mismatch and found.part == "window"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_never_pass(number) -> None:
    made = layout(NATIVE)
    wrong = states(1)
    wrong[0][0, 0, 0] = number
    for stored, computed in ((wrong, states(1)), (states(1), wrong), (wrong, wrong)):
        assert compare(made, payload(made, stored), payload(made, computed)).is_mismatch


def test_tolerances_by_encoding() -> None:
    assert tolerances(layout(NATIVE)) == (2**-4, 2**-4)
    assert tolerances(layout(NATIVE, torch.float32)) == (2**-8, 2**-8)
    assert tolerances(layout(BF16, torch.float32)) == (2**-8 + 2**-8, 2**-8)
    state, window = tolerances(layout(INT8, torch.float32))
    assert window == 2**-8 and 0.08 < state - window < 0.1


@pytest.mark.parametrize("encoding", [BF16, INT8])
def test_rounding_alone_is_within_what_is_allowed_for_it(encoding) -> None:
    """Both sides are rounded, each by at most half of what the encoding adds."""
    made = layout(encoding, torch.float32)
    allowed = (tolerances(made)[0] - tolerances(layout(NATIVE, torch.float32))[0]) / 2
    for state in states(4):
        decoded = torch.empty(SHAPE)
        made.codec.decode([part[0] for part in made.codec.encode(state[None])], decoded)
        assert (decoded - state).norm() / state.norm() <= allowed
