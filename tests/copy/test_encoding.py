"""Encodings of temporal states: the bound of each, what is not finite, sizes, and SGLang's own int8 store."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import codec_for

SMALLEST_NORMAL = 2.0**-126
LOSSY = (CheckpointDtype.BF16, CheckpointDtype.INT8)


@st.composite
def states(draw, top: float = 2.0**100, count: int = 1) -> torch.Tensor:
    """Return float32 states ``[n, HV, V, K]`` with any mix of zeros, tiny and huge numbers."""
    shape = (count, *draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))))
    size = int(torch.tensor(shape).prod())
    number = st.one_of(
        st.floats(-top, top, width=32), st.floats(-1, 1, width=32), st.sampled_from([0.0, -0.0, 1e-44])
    )
    return torch.tensor(draw(st.lists(number, min_size=size, max_size=size))).view(shape)


def round_trip(encoding: CheckpointDtype, given_states: torch.Tensor) -> torch.Tensor:
    codec = codec_for(encoding, tuple(given_states.shape[1:]), given_states.dtype)
    parts = codec.encode(given_states)
    for tensor, part in zip(parts, codec.parts, strict=True):
        assert tensor.shape == (len(given_states), *part.shape) and tensor.dtype == part.dtype
    out = torch.full_like(given_states, torch.nan)
    for index in range(len(given_states)):
        one = [tensor[index] for tensor in parts]
        assert codec.finite(one)
        codec.decode(one, out[index])
    return out


@given(states(count=2))
def test_native_is_bit_for_bit(given_states) -> None:
    back = round_trip(CheckpointDtype.NATIVE, given_states)
    assert torch.equal(back.view(torch.int32), given_states.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_keeps_any_dtype(dtype) -> None:
    given_states = torch.randn(2, 3, 4, 5).to(dtype)
    assert torch.equal(round_trip(CheckpointDtype.NATIVE, given_states), given_states)


@given(states(count=2))
def test_the_bound_of_bf16(given_states) -> None:
    error = (round_trip(CheckpointDtype.BF16, given_states).double() - given_states.double()).abs()
    assert (error <= 2.0**-8 * given_states.double().abs() + SMALLEST_NORMAL * 2.0**-8).all()


def test_bf16_rounds_to_nearest_even_and_does_not_cut() -> None:
    half = 2.0**-8  # half a step of bf16 at 1
    given_states = torch.tensor(
        [1 + half, 1 + 3 * half, 1 + half * 1.01, 1 + half * 0.99, -(1 + half * 1.01)]
    )
    back = round_trip(CheckpointDtype.BF16, given_states.view(1, 1, 5, 1)).flatten()
    assert back.tolist() == [1, 1 + 4 * half, 1 + 2 * half, 1, -(1 + 2 * half)]


@given(states(count=2))
def test_the_bound_of_int8(given_states) -> None:
    error = (round_trip(CheckpointDtype.INT8, given_states).double() - given_states.double()).abs()
    largest = given_states.double().abs().amax(dim=-2, keepdim=True)
    # A few roundings of float32 (quotient, product, scale) come on top of the half step.
    assert (error <= largest / 254 * (1 + 2.0**-14) + SMALLEST_NORMAL).all()


def test_int8_scales_by_head_and_key_channel() -> None:
    state = torch.ones(1, 2, 3, 4)
    state[0, 1, :, 2] = 1e-3  # a small channel beside large ones keeps its digits
    state[0, 1, 1, 2] = 4e-4
    back = round_trip(CheckpointDtype.INT8, state)
    assert (back - state).abs()[0, 1, :, 2].max() <= 1e-3 / 254
    assert torch.equal(back[0, 0], state[0, 0])


@pytest.mark.parametrize("encoding", LOSSY)
@given(given_states=states())
def test_a_second_time_nothing_is_lost(encoding, given_states) -> None:
    once = round_trip(encoding, given_states)
    twice = round_trip(encoding, once)
    # int8 may compute a scale that is one rounding away; the numbers it stands for are the same.
    assert torch.allclose(twice, once, rtol=2.0**-22, atol=SMALLEST_NORMAL)


def test_zeros_stay_zeros() -> None:
    for encoding in CheckpointDtype:
        assert torch.equal(round_trip(encoding, torch.zeros(1, 2, 3, 4)), torch.zeros(1, 2, 3, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_what_is_not_finite_is_found_wherever_it_is(encoding, bad) -> None:
    codec = codec_for(encoding, (2, 3, 4), torch.float32)
    for place in range(24):
        state = torch.randn(1, 2, 3, 4)
        state.view(-1)[place] = bad
        assert not codec.finite([part[0] for part in codec.encode(state)])


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_number_that_the_encoding_cannot_hold_is_not_finite(encoding) -> None:
    codec = codec_for(encoding, (1, 2, 2), torch.float32)
    largest = torch.finfo(torch.float32).max
    parts = [part[0] for part in codec.encode(torch.full((1, 1, 2, 2), largest))]
    out = torch.empty(1, 2, 2)
    codec.decode(parts, out)
    assert codec.finite(parts) == bool(torch.isfinite(out).all())


def test_sizes_of_one_layer_of_qwen35_9b() -> None:
    sizes = {e: codec_for(e, (32, 128, 128), torch.float32).size_bytes for e in CheckpointDtype}
    assert sizes == {"native": 2 << 20, "bf16": 1 << 20, "int8": (512 << 10) + 32 * 128 * 4}


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_float32_is_encoded(encoding, dtype) -> None:
    with pytest.raises(ValueError, match="float32"):
        codec_for(encoding, (1, 2, 2), dtype)


@given(states(top=2.0**20, count=2))
def test_int8_is_what_sglang_makes_of_the_same_state(given_states) -> None:
    upstream = pytest.importorskip("sglang.srt.mem_cache.mamba_checkpoint_pool").Int8CheckpointStore
    quantized, scale = upstream.quantize(given_states)
    ours, our_scale = codec_for(CheckpointDtype.INT8, tuple(given_states.shape[1:]), torch.float32).encode(
        given_states
    )
    usual = given_states.abs().amax(dim=-2) >= 1e-8  # upstream clamps the scale of smaller ones
    assert torch.equal(our_scale[usual], scale.squeeze(-2)[usual])
    same = usual.unsqueeze(-2).expand_as(given_states)
    assert torch.equal(ours[same], quantized[same])
    back = upstream.dequantize(quantized, scale, torch.float32)
    assert torch.equal(round_trip(CheckpointDtype.INT8, given_states)[same], back[same])
