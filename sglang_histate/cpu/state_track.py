"""Copy the recurrent state of tracked requests to their track slots while decoding.

The torch form of SGLang's Triton kernels of the same names: for each batch row whose mask is set, conv and
SSM state go from the row's active slot to its track slot.
"""

from __future__ import annotations

import torch


def track_mamba_states_if_needed_cpu(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """One layer: conv_states [slots, ...], ssm_states [slots, ...]."""
    track_mamba_states_all_layers_cpu(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_mamba_states_all_layers_cpu(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """All layers: pools [layers, slots, ...]; mask, source and track slots [>= batch_size].

    With `check_freed_slots`, rows whose source or track slot is negative are skipped.
    """
    source = cache_indices[:batch_size].long()
    target = mamba_track_indices[:batch_size].long()
    rows = mamba_track_mask[:batch_size].bool()
    if check_freed_slots:
        rows = rows & (source >= 0) & (target >= 0)
    source, target = source[rows], target[rows]
    if source.numel() == 0:
        return
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]
