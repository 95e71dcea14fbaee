"""Causal depthwise convolution over a varlen batch, and its one-token step.

The window of a sequence is its last W - 1 raw inputs (before the convolution), kept per slot as
[D, W - 1] and updated in place. A negative slot index means padding: no window is read or written.

Every output element is the same sum, in the same order, of separately rounded products, so the result does
not depend on how a sequence is cut into calls or batched with others. That holds across calls only if the
pool keeps the window in the dtype of the activations: float32 models need SGLANG_MAMBA_CONV_DTYPE=float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

# Elements per tile: input, output and one temporary stay in the second-level cache.
TILE_ELEMENTS = 65536


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """Prefill. x [D, T] (any strides), weight [D, W], conv_states [slots, D, W - 1] -> [D, T], token-major.

    `has_initial_state` [N] says which sequences continue their window; the others start from zeros.
    """
    del seq_lens_cpu  # query_start_loc says the same
    tokens = x.transpose(0, 1)
    width = weight.shape[1]
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    bounds = query_start_loc.tolist()
    slots = cache_indices.tolist()
    resumes = has_initial_state.tolist()
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        history = tokens.new_zeros(width - 1, tokens.shape[1])
        if slots[i] >= 0 and resumes[i]:
            history.copy_(conv_states[slots[i]].transpose(0, 1))
        padded = torch.cat((history, tokens[begin:end]))
        _convolve(padded, weight, bias, activation, out[begin:end])
        if slots[i] >= 0:
            conv_states[slots[i]].copy_(padded[padded.shape[0] - (width - 1) :].transpose(0, 1))
    return out.transpose(0, 1)


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Decode: one token for each of B sequences. x [B, D] -> [B, D]; rows with a negative slot give zeros."""
    width = weight.shape[1]
    slots = conv_state_indices[: x.shape[0]].long()
    live = (slots >= 0).nonzero(as_tuple=True)[0]
    slots = slots[live]
    history = conv_states[slots].to(x.dtype)
    window = torch.cat((history, x[live].unsqueeze(-1)), dim=-1)
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    total = window[..., 0].float() * weight[:, 0].float()
    for j in range(1, width):
        total += window[..., j].float() * weight[:, j].float()
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    out[live] = _activate(total, bias, activation).to(x.dtype)
    return out


def _convolve(
    padded: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """padded [W - 1 + L, D] -> out [L, D], tile by tile."""
    width = weight.shape[1]
    taps = [weight[:, j].float().contiguous() for j in range(width)]
    length, dim = out.shape
    tile = max(1, TILE_ELEMENTS // dim)
    for lo in range(0, length, tile):
        hi = min(lo + tile, length)
        rows = padded[lo : hi + width - 1].float()
        total = rows[: hi - lo] * taps[0]
        for j in range(1, width):
            total += rows[j : j + hi - lo] * taps[j]
        out[lo:hi].copy_(_activate(total, bias, activation))


def _activate(total: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """Add the bias and apply SiLU in place; x / (1 + exp(-x)) as separate ops, see gdn_math."""
    if bias is not None:
        total += bias.float()
    if activation in ("silu", "swish"):
        total /= torch.neg(total).exp_().add_(1.0)
    elif activation is not None:
        raise NotImplementedError(f"a convolution with activation {activation!r} is not available on CPU")
    return total
