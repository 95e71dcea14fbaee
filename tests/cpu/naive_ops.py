"""Token-by-token float64 forms of the CPU ops: slow, short and easy to check against the equations."""

from __future__ import annotations

import torch


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """q, k [T, H, K], v [T, HV, V], g, beta [T, HV], state [HV, V, K] -> o, last, states before chunks."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    group = v.shape[1] // k.shape[1]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, dim=1) for x in (q, k)
    )
    q = q * q.shape[-1] ** -0.5
    outputs, before = torch.zeros_like(v), []
    for t in range(v.shape[0]):
        if t % 64 == 0:
            before.append(state.clone())
        state = state * g[t].exp()[:, None, None]
        read = torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", (v[t] - read) * beta[t][:, None], k[t])
        outputs[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return outputs, state, before


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    A_log, a, b, dt_bias = (x.double() for x in (A_log, a, b, dt_bias))
    return -A_log.exp() * torch.log1p((a + dt_bias).exp()), b.sigmoid()


def causal_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, D], window [D, W - 1], weight [D, W] -> silu(conv) [T, D] and the new window."""
    padded = torch.cat((window.T, x)).double()
    width = weight.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        out[t] = (padded[t : t + width].T * weight.double()).sum(-1)
        if bias is not None:
            out[t] += bias.double()
    return out * out.sigmoid(), padded[padded.shape[0] - (width - 1) :].T
