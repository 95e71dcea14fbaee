"""The gated delta rule on 64-token chunks, in torch, fp32.

Per value head, with state S [V, K] (fp32) and one token (q, k, v, g, beta)::

    S <- exp(g) * S;  S <- S + beta * (v - S k) k^T;  o = S q / sqrt(K)

A chunk of 64 tokens is solved at once in WY form: the pseudo-values u = T (beta v) and w = T (beta exp(G) k)
come from one unit lower triangular solve, then the state needs two matrix products per chunk.

Every result depends on its own chunk and the state before it only, bit for bit: it does not matter how many
chunks or sequences share the call. Three rules give that; keep them when you change something here:

* every matrix product has the shape of ONE chunk ([HV, 64, .]), because a BLAS may pick another kernel, with
  another order of additions, for another batch size; triangular solves go matrix by matrix inside torch;
* elementwise work uses exp, log1p, sqrt and plain arithmetic as separate ops. Fused ones (sigmoid, silu,
  softplus, addcmul) round differently in the vector body and in the scalar tail of a loop;
* short chunks are padded with tokens that do nothing (beta = 0, g = 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64
NORM_EPS = 1e-6  # the value in SGLang's l2norm kernels


class ChunkFactors(NamedTuple):
    """What the recurrence over chunks needs; NC chunks, C = 64 tokens each, all fp32 and contiguous."""

    u: torch.Tensor  # [NC, HV, C, V]
    wq: torch.Tensor  # [NC, HV, 2C, K]: rows w, then rows exp(G) q / sqrt(K)
    scores: torch.Tensor  # [NC, HV, C, C]: decayed, causal q k^T / sqrt(K)
    k_to_end: torch.Tensor  # [NC, HV, C, K]: exp(G_last - G) k
    decay: torch.Tensor  # [NC, HV, 1, 1]: exp(G_last)


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x / (x * x).sum(-1, keepdim=True).add_(NORM_EPS).sqrt_()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(torch.neg(x).exp_().add_(1.0))


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold."""
    scaled = x * beta
    return torch.where(scaled <= threshold, torch.exp(scaled).log1p_() / beta, x)


def chunk_factors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> ChunkFactors:
    """q, k [NC, HV, C, K], v [NC, HV, C, V], g, beta [NC, HV, C]; all fp32 and contiguous."""
    num_chunks, heads, _, key_dim = q.shape
    decay_sum = g.cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu_(1)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = (decay_sum.unsqueeze(-1) - decay_sum.unsqueeze(-2)).masked_fill_(above, float("-inf")).exp_()

    kq = torch.cat((k, q * key_dim**-0.5), dim=-2)
    products = q.new_empty(num_chunks, heads, 2 * CHUNK, CHUNK)
    for c in range(num_chunks):
        torch.bmm(kq[c], k[c].transpose(1, 2), out=products[c])
    system = (products[:, :, :CHUNK] * decay).mul_(beta.unsqueeze(-1))
    scores = products[:, :, CHUNK:] * decay

    grown = decay_sum.exp().unsqueeze(-1)
    right = torch.cat((v, k * grown), dim=-1).mul_(beta.unsqueeze(-1))
    # unitriangular: the diagonal of `system` is ignored and read as ones.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], key_dim), dim=-1)
    last = decay_sum[..., -1:]
    return ChunkFactors(
        u=u.contiguous(),
        wq=torch.cat((w, kq[:, :, CHUNK:] * grown), dim=-2),
        scores=scores,
        k_to_end=k * (last - decay_sum).exp_().unsqueeze(-1),
        decay=last.exp().unsqueeze(-1),
    )


def run_chunks(f: ChunkFactors, start: torch.Tensor, before: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Carry one sequence's state over its NC chunks and return the last state [HV, V, K].

    `start` [HV, V, K] is the state before the first chunk. Written: `before` [NC, HV, V, K], the state before
    every chunk, and `out` [NC, HV, C, V].
    """
    state = start
    for c in range(f.u.shape[0]):
        before[c].copy_(state)
        read = torch.bmm(f.wq[c], state.transpose(1, 2))
        fresh = f.u[c] - read[:, :CHUNK]
        torch.baddbmm(read[:, CHUNK:], f.scores[c], fresh, out=out[c])
        state = torch.baddbmm(state * f.decay[c], fresh.transpose(1, 2), f.k_to_end[c])
    return state
