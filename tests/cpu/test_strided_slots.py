"""The CPU ops on the slots of one device pool: rows far apart in one buffer of bytes, reached through a translation.

Each op gives bit for bit what it gives on packed slots, and writes nowhere else in the buffer.
"""

from __future__ import annotations

import torch

from sglang_histate.cpu.attention import extend_attention_cpu
from sglang_histate.cpu.conv import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from sglang_histate.cpu.gdn import chunk_gated_delta_rule_cpu, fused_sigmoid_gating_delta_rule_update_cpu
from sglang_histate.cpu.kvcacheio import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
)
from sglang_histate.cpu.state_track import track_mamba_states_all_layers_cpu

SLOTS, HEADS, VALUE, KEY, DIM, WIDTH = 7, 2, 16, 32, 12, 4
GUARD = -77.0


class Envelopes:
    """`layers` layers of conv windows and states as views of one buffer: an entry is [conv of all | states of all | pad]."""

    def __init__(self, layers: int = 2) -> None:
        conv, state, pad = DIM * (WIDTH - 1), HEADS * VALUE * KEY, 5
        entry = layers * (conv + state) + pad
        self.raw = torch.full((SLOTS * entry,), GUARD)
        self.conv = torch.as_strided(self.raw, (layers, SLOTS, DIM, WIDTH - 1), (conv, entry, WIDTH - 1, 1))
        self.states = torch.as_strided(
            self.raw, (layers, SLOTS, HEADS, VALUE, KEY), (state, entry, VALUE * KEY, KEY, 1), layers * conv
        )
        self._used = torch.zeros(entry, dtype=torch.bool)
        self._used[: entry - pad] = True

    def padding_untouched(self) -> bool:
        return bool((self.raw.view(SLOTS, -1)[:, ~self._used] == GUARD).all())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_convolution() -> None:
    pool = Envelopes()
    packed = normal(SLOTS, DIM, WIDTH - 1)
    pool.conv[1].copy_(packed)
    x, weight, slots = normal(DIM, 90), normal(DIM, WIDTH), torch.tensor([5, 2], dtype=torch.int32)
    rest = (torch.tensor([True, False]), slots, torch.tensor([0, 70, 90]), [70, 20])
    expected = causal_conv1d_fn_cpu(x, weight, None, "silu", packed, *rest)
    assert torch.equal(causal_conv1d_fn_cpu(x, weight, None, "silu", pool.conv[1], *rest), expected)
    assert torch.equal(pool.conv[1], packed)
    step = normal(2, DIM, seed=1)
    expected = causal_conv1d_update_cpu(step, packed, weight, None, "silu", slots)
    assert torch.equal(causal_conv1d_update_cpu(step, pool.conv[1], weight, None, "silu", slots), expected)
    assert torch.equal(pool.conv[1], packed)
    assert pool.padding_untouched() and (pool.states == GUARD).all() and (pool.conv[0] == GUARD).all()


def test_gated_delta_rule() -> None:
    pool = Envelopes()
    packed = normal(SLOTS, HEADS, VALUE, KEY)
    pool.states[0].copy_(packed)
    tokens, slots = 150, torch.tensor([6, 1], dtype=torch.int32)
    q, k, v = normal(1, tokens, 1, KEY), normal(1, tokens, 1, KEY, seed=1), normal(1, tokens, HEADS, VALUE)
    g, beta = -normal(1, tokens, HEADS).abs(), normal(1, tokens, HEADS, seed=2).sigmoid()
    bounds = torch.tensor([0, 100, 150])
    expected = chunk_gated_delta_rule_cpu(q, k, v, g, beta, packed, bounds, initial_state_indices=slots)
    found = chunk_gated_delta_rule_cpu(q, k, v, g, beta, pool.states[0], bounds, initial_state_indices=slots)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(pool.states[0], packed)
    gates = dict(
        A_log=normal(HEADS), dt_bias=normal(HEADS, seed=1), a=normal(2, HEADS), b=normal(2, HEADS, seed=3)
    )
    steps = dict(
        **gates,
        q=q[:, :2],
        k=k[:, :2],
        v=v[:, :2],
        initial_state_indices=slots,
        cu_seqlens=torch.arange(3),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    expected_step = fused_sigmoid_gating_delta_rule_update_cpu(initial_state_source=packed, **steps)
    found_step = fused_sigmoid_gating_delta_rule_update_cpu(initial_state_source=pool.states[0], **steps)
    assert torch.equal(found_step, expected_step) and torch.equal(pool.states[0], packed)
    assert pool.padding_untouched() and (pool.conv == GUARD).all() and (pool.states[1] == GUARD).all()


def test_tracked_states_of_all_layers() -> None:
    pool = Envelopes()
    pool.conv.copy_(normal(*pool.conv.shape))
    pool.states.copy_(normal(*pool.states.shape))
    conv, states = pool.conv.clone(), pool.states.clone()
    # Row 1 is not tracked, row 2 has lost its slot.
    track_mamba_states_all_layers_cpu(
        pool.conv,
        pool.states,
        torch.tensor([3, 4, -1], dtype=torch.int32),
        torch.tensor([True, False, True]),
        torch.tensor([6, 5, 2]),
        3,
        check_freed_slots=True,
    )
    conv[:, 6], states[:, 6] = conv[:, 3], states[:, 3]
    assert torch.equal(pool.conv, conv) and torch.equal(pool.states, states) and pool.padding_untouched()


def test_attention_through_a_page_table() -> None:
    page, pages, heads, dim = 4, 9, 2, 16
    virtual_to_physical = torch.tensor([0, 7, 3, 8, 1, 5])  # virtual page -> physical page
    raw = normal(pages * page, 3 * heads * dim)
    k, v = (raw[:, i * heads * dim : (i + 1) * heads * dim].unflatten(1, (heads, dim)) for i in (0, 2))
    tokens = 18
    virtual = torch.cat([torch.arange(p * page, (p + 1) * page) for p in (5, 1, 4, 2, 3)])[:tokens]
    physical = virtual_to_physical[virtual // page] * page + virtual % page
    assert not torch.equal(virtual, physical)
    query = normal(tokens - 7, 2 * heads, dim)

    def attend(keys, values, ids, translate):
        table = torch.zeros(3, tokens, dtype=torch.int32)
        table[2] = ids
        lengths = [torch.tensor([n]) for n in (tokens, 7, tokens - 7)]
        output = torch.empty_like(query)
        return extend_attention_cpu(
            query, output, keys, values, table, torch.tensor([2]), *lengths, translate=translate
        )

    expected = attend(k[physical].contiguous(), v[physical].contiguous(), torch.arange(tokens), None)
    found = attend(
        k, v, virtual, lambda ids: virtual_to_physical[ids.long() // page] * page + ids.long() % page
    )
    assert torch.equal(found, expected)


def test_host_copies_of_strided_rows() -> None:
    page, layers, row = 4, 2, 6
    raw = normal(16, layers * 2 * row)  # [token][layer][K, V]
    device = [raw[:, i * row : (i + 1) * row] for i in range(2 * layers)]
    keys, values = device[0::2], device[1::2]
    host = torch.zeros(2, 5, layers, page, row)
    tokens, slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), torch.tensor([12, 13, 14, 15, 4, 5, 6, 7])
    before = raw.clone()
    transfer_kv_all_layer_direct_lf_pf([*keys, *values], [host[0], host[1]], tokens, slots, page)
    for layer in range(layers):
        assert torch.equal(host[0, 3, layer], keys[layer][8:12])
        assert torch.equal(host[1, 1, layer], values[layer][0:4])
    raw[tokens] = 0
    for layer in range(layers):
        transfer_kv_per_layer_direct_pf_lf(
            [host[0], host[1]], [keys[layer], values[layer]], slots, tokens, layer, page
        )
    assert torch.equal(raw, before)
