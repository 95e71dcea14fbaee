"""Layer norm and RMS norm with an optional gate: the torch form of SGLang's Triton `layernorm_fn`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layernorm_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """norm(x) * act(z), or norm(x * act(z)) if not `norm_before_gate`; x, z [..., D].

    `group_size` norms each group of that many features on its own. Computed in fp32, returned in x's dtype.
    """
    out = x.float()
    gate = None if z is None else _gate(z.float(), activation)
    if gate is not None and not norm_before_gate:
        out = out * gate
    grouped = out.unflatten(-1, (-1, group_size or out.shape[-1]))
    if not is_rms_norm:
        grouped = grouped - grouped.mean(-1, keepdim=True)
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    out = (grouped * scale).flatten(-2) * weight.float()
    if bias is not None:
        out = out + bias.float()
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(x.dtype)


def _gate(z: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in ("swish", "silu"):
        return F.silu(z)
    if activation == "sigmoid":
        return torch.sigmoid(z)
    raise NotImplementedError(f"a norm gated with {activation!r} is not available on CPU")
