"""Projection splits, query/key norms and gates of the Qwen3.5 and Qwen3-Next blocks.

Names and argument order are those of the `torch.ops.sgl_kernel` calls in sglang 0.5.23
(`srt/models/qwen3_5.py`). nk, nv: key and value heads; dk, dv: their sizes; all counts are per rank.
"""

from __future__ import annotations

import torch


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, nk: int, nv: int, dk: int, dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3.5 layout, blocks q | k | v | z and b | a.

    mixed_qkvz [T, 2 nk dk + 2 nv dv], mixed_ba [T, 2 nv]
    -> mixed_qkv [T, 2 nk dk + nv dv], z [T, nv, dv], b [T, nv], a [T, nv], all contiguous.
    """
    qkv_dim = 2 * nk * dk + nv * dv
    z = mixed_qkvz[:, qkv_dim:].contiguous().view(-1, nv, dv)
    b, a = mixed_ba.split((nv, nv), dim=-1)
    return mixed_qkvz[:, :qkv_dim].contiguous(), z, b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat_cpu(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, nk: int, nv: int, dk: int, dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3-Next layout: for each key head its q | k | v | z, and b | a; nv / nk value heads per key head.

    Results as in the Qwen3.5 form.
    """
    tokens, group = mixed_qkvz.shape[0], nv // nk
    per_head = mixed_qkvz.view(tokens, nk, 2 * dk + 2 * group * dv)
    q, k, v, z = per_head.split((dk, dk, group * dv, group * dv), dim=-1)
    b, a = mixed_ba.view(tokens, nk, 2 * group).split((group, group), dim=-1)
    mixed_qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1)
    return mixed_qkv, z.reshape(tokens, nv, dv), b.reshape(tokens, nv), a.reshape(tokens, nv)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm per head with weight (1 + w). q [T, heads * head_dim] -> [T * heads, head_dim]; k likewise."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_gate [T, heads * 2 * head_dim] holds query | gate per head; k [T, kv_heads * head_dim].

    -> q [T, heads * head_dim], k [T, kv_heads * head_dim], both normed, and gate [T, heads * head_dim].
    """
    tokens = q_gate.shape[0]
    q, gate = q_gate.reshape(tokens, num_heads, 2 * head_dim).split((head_dim, head_dim), dim=-1)
    return (
        _gemma_norm(q, q_weight, eps, head_dim).view(tokens, -1),
        _gemma_norm(k, k_weight, eps, head_dim).view(tokens, -1),
        gate.reshape(tokens, -1),
    )


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x *= sigmoid(gate), in place."""
    x.mul_(torch.sigmoid(gate.view(x.shape)))


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    """[..., heads * head_dim] or [..., head_dim] -> [rows, head_dim], in x's dtype."""
    rows = x.reshape(-1, head_dim).float()
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale * (1.0 + weight.float())).to(x.dtype)
