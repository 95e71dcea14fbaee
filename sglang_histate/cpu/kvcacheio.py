"""Copies between the engine's pools and HiCache's host pools, as torch indexing.

The three functions that `--hicache-io-backend direct` uses, with upstream's names. On a CPU engine both sides
are host memory, so `device` below means the engine's pool. Layouts:

* layer first (`lf`): one tensor per layer, [tokens, ...];
* page first (`pf`): one tensor for all layers, [pages, layers, page_size, ...].

Index lists name tokens, whole pages at a time and in order; page = index // page_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """dst[l][dst_indices] = src[l][src_indices] for every layer."""
    del page_size
    src_rows, dst_rows = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_rows] = src[src_rows]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load one layer: host (page first) -> device (layer first), for each (host, device) pair."""
    pages, offsets = _page_address(src_indices, page_size)
    rows = dst_indices.long()
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[rows] = host[:, layer_id][pages, offsets].view(rows.shape[0], *device.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Save all layers: device (layer first) -> host (page first).

    `src_ptrs` lists the L layers of the first host tensor, then those of the second (keys, then values).
    """
    pages, offsets = _page_address(dst_indices, page_size)
    rows = src_indices.long()
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for i, device in enumerate(src_ptrs):
        host = dst_ptrs[i // num_layers][:, i % num_layers]
        host[pages, offsets] = device[rows].view(rows.shape[0], *host.shape[2:])


def _page_address(indices: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices = indices.long()
    return indices.div(page_size, rounding_mode="floor"), indices % page_size
