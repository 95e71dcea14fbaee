"""Projection splits, per-head norms and the gated norm against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang_histate.cpu.gated_norm import layernorm_fn_cpu
from sglang_histate.cpu.qkv import (
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qkvzba_split_reshape_cat_cpu,
    fused_sigmoid_mul_cpu,
)

NK, NV, DK, DV, T = 2, 4, 8, 16, 5


def blocks() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(T, NK, DK), torch.randn(T, NK, DK)
    v, z = torch.randn(T, NV, DV), torch.randn(T, NV, DV)
    b, a = torch.randn(T, NV), torch.randn(T, NV)
    return q, k, v, z, b, a


def check_split(result, parts) -> None:
    q, k, v, z, b, a = parts
    mixed_qkv, out_z, out_b, out_a = result
    assert torch.equal(mixed_qkv, torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1))
    assert torch.equal(out_z, z) and torch.equal(out_b, b) and torch.equal(out_a, a)
    assert all(x.is_contiguous() for x in result)


def test_split_of_blocks():
    parts = q, k, v, z, b, a = blocks()
    qkvz = torch.cat([x.flatten(1) for x in (q, k, v, z)], dim=-1)
    check_split(
        fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, torch.cat((b, a), dim=-1), NK, NV, DK, DV), parts
    )


def test_split_of_head_groups():
    parts = q, k, v, z, b, a = blocks()
    grouped = [x.reshape(T, NK, -1) for x in (q, k, v, z)]
    qkvz = torch.cat(grouped, dim=-1).flatten(1)
    ba = torch.cat([x.reshape(T, NK, -1) for x in (b, a)], dim=-1).flatten(1)
    check_split(fused_qkvzba_split_reshape_cat_cpu(qkvz, ba, NK, NV, DK, DV), parts)


def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())


def test_qk_norm_with_and_without_gate():
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 16
    q, gate, k = torch.randn(T, heads, dim), torch.randn(T, heads, dim), torch.randn(T, kv_heads, dim)
    qw, kw = torch.randn(dim), torch.randn(dim)
    want_q, want_k = gemma(q, qw), gemma(k, kw)
    out_q, out_k = fused_qk_gemma_rmsnorm_cpu(q.flatten(1), k.flatten(1), qw, kw, 1e-6, dim)
    torch.testing.assert_close(out_q.double(), want_q.view(-1, dim), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_k.double(), want_k.view(-1, dim), rtol=1e-5, atol=1e-5)

    qg = torch.stack((q, gate), dim=2).flatten(1)
    out_q, out_k, out_gate = fused_qk_gemma_rmsnorm_with_gate_cpu(qg, k.flatten(1), qw, kw, 1e-6, dim, heads)
    torch.testing.assert_close(out_q.double(), want_q.flatten(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_k.double(), want_k.flatten(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out_gate, gate.flatten(1))


def test_sigmoid_mul_is_in_place():
    x, gate = torch.randn(T, 32), torch.randn(T, 32)
    want = x * gate.sigmoid()
    fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, want)


@pytest.mark.parametrize("activation,act", [("swish", F.silu), ("silu", F.silu), ("sigmoid", torch.sigmoid)])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group", [None, 8])
def test_gated_rms_norm(activation, act, before, group):
    torch.manual_seed(0)
    x, z, weight = torch.randn(T, 16), torch.randn(T, 16), torch.randn(16)
    raw = x.double() if before else x.double() * act(z.double())
    rows = raw.view(T, -1, group or 16)
    want = (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(T, 16) * weight.double()
    if before:
        want = want * act(z.double())
    out = layernorm_fn_cpu(
        x,
        weight,
        None,
        z=z,
        group_size=group,
        norm_before_gate=before,
        is_rms_norm=True,
        activation=activation,
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_layer_norm_with_bias():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(T, 16), torch.randn(16), torch.randn(16)
    out = layernorm_fn_cpu(x, weight, bias, eps=1e-5)
    torch.testing.assert_close(out, F.layer_norm(x, (16,), weight, bias, eps=1e-5), rtol=1e-5, atol=1e-5)


def test_unknown_gate_is_refused():
    with pytest.raises(NotImplementedError, match="tanh"):
        layernorm_fn_cpu(torch.ones(1, 4), torch.ones(4), None, z=torch.ones(1, 4), activation="tanh")
