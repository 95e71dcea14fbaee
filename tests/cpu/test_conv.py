"""Causal convolution: against a float64 loop, and bit-exact windows and outputs however calls are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.cpu.conv import causal_conv1d_fn_cpu, causal_conv1d_update_cpu

from .naive_ops import causal_conv

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 63, 64, 65, 130]), min_size=1, max_size=4)


def prefill(x, weight, bias, states, resumes, slots, lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return causal_conv1d_fn_cpu(
        x.transpose(0, 1),
        weight,
        bias,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.tensor(resumes),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=bounds,
        seq_lens_cpu=lengths,
    ).transpose(0, 1)


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from([1, 24, 192]), st.integers(2, 5), st.booleans(), st.integers(0, 1000))
def test_prefill_matches_the_loop(lengths, dim, width, with_bias, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(sum(lengths), dim), torch.randn(dim, width)
    bias = torch.randn(dim) if with_bias else None
    states = torch.randn(6, dim, width - 1)
    old = states.clone()
    slots = [3, 0, -1, 5][: len(lengths)]
    resumes = [True, False, True, True][: len(lengths)]
    out = prefill(x, weight, bias, states, resumes, slots, lengths)
    begin = 0
    for length, slot, resume in zip(lengths, slots, resumes, strict=True):
        if slot >= 0 and length:
            window = old[slot] if resume else torch.zeros_like(old[slot])
            want, new_window = causal_conv(x[begin : begin + length], window, weight, bias)
            torch.testing.assert_close(out[begin : begin + length].double(), want, rtol=1e-5, atol=1e-5)
            assert torch.equal(states[slot].double(), new_window)
        begin += length
    written = {s for s, n in zip(slots, lengths, strict=True) if n}
    untouched = [s for s in range(6) if s not in written]
    assert torch.equal(states[untouched], old[untouched])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dim", [40, 512])
def test_cutting_a_prompt_changes_no_bit(threads, dim):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        x, weight, start = torch.randn(1000, dim), torch.randn(dim, 4), torch.randn(2, dim, 3)
        whole = start.clone()
        out = prefill(x, weight, None, whole, [True], [1], [1000])
        for step in (1, 7, 64, 256):
            states = start.clone()
            parts = [
                prefill(x[lo : lo + step], weight, None, states, [True], [1], [min(step, 1000 - lo)])
                for lo in range(0, 1000, step)
            ]
            assert torch.equal(torch.cat(parts), out)
            assert torch.equal(states, whole)
    finally:
        torch.set_num_threads(before)


def test_decode_step_continues_prefill():
    torch.manual_seed(1)
    x, weight, bias = torch.randn(5, 48), torch.randn(48, 4), torch.randn(48)
    states = torch.randn(4, 48, 3)
    old = states.clone()
    slots = [2, -1, 0, 3, -1]
    out = causal_conv1d_update_cpu(
        x, states, weight, bias, "silu", conv_state_indices=torch.tensor(slots, dtype=torch.int32)
    )
    for i, slot in enumerate(slots):
        if slot < 0:
            assert not out[i].any()
            continue
        want, window = causal_conv(x[i : i + 1], old[slot], weight, bias)
        torch.testing.assert_close(out[i : i + 1].double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(states[slot].double(), window)
    assert torch.equal(states[1], old[1])
