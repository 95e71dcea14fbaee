"""Causal attention of new tokens over a cached prefix, for SGLang's `torch_native` backend on CPU.

Upstream's torch form attends from every position of the sequence and throws the cached ones away, so a short
suffix after a long hit costs as much as a cold prefill: any measure of what a cache hit saves would be wrong.
This form computes new positions only.

Queries are handled in blocks of 64 at absolute positions, and a block always sees the keys up to its own end
(missing ones are zero and masked). So the shapes of all products depend on the block's position only, and the
result is the same, bit for bit, however a prompt is cut into chunks, cached or batched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 64


def extend_attention_cpu(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    scaling: float | None = None,
    translate: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """query, output [T, H, D] with the new tokens of all sequences end to end; caches [slots, HKV, D] of any strides.

    `seq_lens` = prefix + new tokens, per sequence. `translate` turns the ids in `req_to_token` into slots of the
    caches; None where they are slots already. Writes and returns `output`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    begin = 0
    for request, total, prefix, new in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        slots = req_to_token[request, :total]
        if translate is not None:
            slots = translate(slots)
        keys, values = (_by_head(cache, slots, query.dtype) for cache in (k_cache, v_cache))
        _attend(query[begin : begin + new], output[begin : begin + new], keys, values, prefix, scale)
        begin += new
    return output


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: int,
    scale: float,
) -> None:
    """query, output [new, H, D]; keys, values [HKV, padded, D]."""
    new, heads, dim = query.shape
    future = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu_(1)
    for start in range(prefix // BLOCK * BLOCK, prefix + new, BLOCK):
        end = start + BLOCK
        lo, hi = max(start, prefix), min(end, prefix + new)
        block = query.new_zeros(1, heads, BLOCK, dim)
        block[0, :, lo - start : hi - start] = query[lo - prefix : hi - prefix].transpose(0, 1)
        mask = query.new_zeros(BLOCK, end)
        mask[:, start:].masked_fill_(future, float("-inf"))
        result = scaled_dot_product_attention(
            block,
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=mask,
            scale=scale,
            enable_gqa=heads != keys.shape[0],
        )
        output[lo - prefix : hi - prefix] = result[0, :, lo - start : hi - start].transpose(0, 1)


def _by_head(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, HKV, D] -> [HKV, length rounded up to a block, D] in `dtype`, zero padded."""
    padded = -(-slots.shape[0] // BLOCK) * BLOCK
    out = torch.zeros(cache.shape[1], padded, cache.shape[2], dtype=dtype)
    out[:, : slots.shape[0]] = cache[slots].transpose(0, 1)
    return out
