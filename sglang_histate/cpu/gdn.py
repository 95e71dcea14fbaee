"""The gated-delta-net ops that SGLang calls on CPU: prefill in chunks, one decode step, and the two gates.

Names, argument order and keyword names are those of the call sites in sglang 0.5.23
(`srt/layers/attention/linear/kernels/gdn_triton.py`, `gdn_backend.py`). One thing is more than upstream's CPU
op gives: the prefill op returns `h`, the state before every 64-token chunk, which radix caching with
`extra_buffer` and HiState's capture read.

Shapes: T tokens of all sequences laid end to end, N sequences, H key heads, HV value heads (a multiple of H),
K and V head sizes. The state pool is [slots, HV, V, K] and is updated in place. A negative slot index means
padding: that sequence starts from zero and writes nothing.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sglang_histate.cpu.gdn_math import (
    CHUNK,
    chunk_factors,
    l2_normalise,
    run_chunks,
    sigmoid,
    softplus,
)

# Chunks whose factors are built together: enough to hide the per-op cost, few enough to stay in the cache.
GROUP = 8


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), both fp32 [1, T, HV].

    a, b [T, HV]; A_log, dt_bias [HV].
    """
    g = softplus(a.float() + dt_bias.float()).mul_(A_log.float().exp().neg_())
    return g.unsqueeze(0), sigmoid(b.float()).unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefill. q, k [1, T, H, K], v [1, T, HV, V], g, beta [1, T, HV]; cu_seqlens [N + 1].

    Without `initial_state_indices`, sequence i uses slot i. Returns (o [1, T, HV, V] in v's dtype,
    last_state [N, HV, V, K] fp32, h [1, NT, HV, V, K] fp32), NT = sum of ceil(length / 64); the rows of h
    are ordered by sequence, then by chunk.
    """
    if head_first:
        raise NotImplementedError("the CPU gated delta rule takes [1, T, H, K] only (head_first=False)")
    bounds = cu_seqlens.tolist()
    num_seqs = len(bounds) - 1
    slots = list(range(num_seqs)) if initial_state_indices is None else initial_state_indices.tolist()
    heads, value_dim, key_dim = initial_state.shape[-3:]
    num_chunks = [-(-(end - begin) // CHUNK) for begin, end in pairwise(bounds)]

    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    h = initial_state.new_empty((sum(num_chunks), heads, value_dim, key_dim), dtype=torch.float32)
    last = h.new_zeros((num_seqs, heads, value_dim, key_dim))
    row = 0
    for i, (begin, slot) in enumerate(zip(bounds[:-1], slots[:num_seqs], strict=True)):
        if slot >= 0:
            last[i].copy_(initial_state[slot])
        for first in range(0, num_chunks[i], GROUP):
            count = min(GROUP, num_chunks[i] - first)
            lo = begin + first * CHUNK
            hi = min(lo + count * CHUNK, bounds[i + 1])
            qc, kc, vc, gc, bc = (_chunked(x[0, lo:hi], count, heads) for x in (q, k, v, g, beta))
            if use_qk_l2norm_in_kernel:
                qc, kc = l2_normalise(qc), l2_normalise(kc)
            out = torch.empty_like(vc)
            factors = chunk_factors(qc, kc, vc, gc, bc)
            last[i].copy_(run_chunks(factors, last[i], h[row : row + count], out))
            o[0, lo:hi].copy_(out.transpose(1, 2).flatten(0, 1)[: hi - lo])
            row += count
        if slot >= 0 and num_chunks[i]:
            initial_state[slot].copy_(last[i])
    return o, last, h.unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """Decode: one token for each of B sequences. q, k [1, B, H, K], v [1, B, HV, V], a, b [B, HV].

    Returns o [1, B, HV, V] in v's dtype. Rows with a negative slot index give zeros and touch no state.
    """
    batch = q.shape[1]
    if cu_seqlens is not None and cu_seqlens.numel() != batch + 1:
        raise NotImplementedError("the CPU decode step takes exactly one token per sequence")
    o = torch.zeros_like(v, memory_format=torch.contiguous_format)
    slots = initial_state_indices[:batch].long()
    live = (slots >= 0).nonzero(as_tuple=True)[0]
    if live.numel() == 0:
        return o
    slots = slots[live]
    heads = v.shape[2]
    group = heads // q.shape[2]
    qn, kn = (x[0, live].float().repeat_interleave(group, dim=1) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        qn, kn = l2_normalise(qn), l2_normalise(kn)
    qn = qn * q.shape[-1] ** -0.5
    gate = softplus(
        a.view(batch, heads)[live].float() + dt_bias.float(), softplus_beta, softplus_threshold
    ).mul_(A_log.float().exp().neg_())
    beta = sigmoid(b.view(batch, heads)[live].float())

    state = initial_state_source[slots].float() * gate.exp_()[..., None, None]
    fresh = (v[0, live].float() - (state * kn.unsqueeze(-2)).sum(-1)).mul_(beta.unsqueeze(-1))
    state += fresh.unsqueeze(-1) * kn.unsqueeze(-2)
    o[0, live] = (state * qn.unsqueeze(-2)).sum(-1).to(o.dtype)
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return o


def _chunked(x: torch.Tensor, count: int, heads: int) -> torch.Tensor:
    """[tokens, H or HV, ...] -> fp32 [count, HV, 64, ...], zero padded, key heads repeated per group."""
    own_heads = x.shape[1]
    chunked = x.new_zeros((count, heads, CHUNK, *x.shape[2:]), dtype=torch.float32)
    by_token = chunked.view(count, own_heads, heads // own_heads, CHUNK, *x.shape[2:])
    full, tail = divmod(x.shape[0], CHUNK)
    if full:
        rows = x[: full * CHUNK].view(full, CHUNK, own_heads, 1, *x.shape[2:])
        by_token[:full].copy_(rows.movedim(1, 3))
    if tail:
        by_token[full, :, :, :tail].copy_(x[full * CHUNK :].unsqueeze(2).movedim(0, 2))
    return chunked
