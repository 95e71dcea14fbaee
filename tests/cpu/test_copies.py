"""HiCache's direct copies and the copies of tracked states, byte for byte."""

from __future__ import annotations

import pytest
import torch

from sglang_histate.cpu.kvcacheio import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)
from sglang_histate.cpu.state_track import (
    track_mamba_states_all_layers_cpu,
    track_mamba_states_if_needed_cpu,
)

LAYERS, PAGES = 3, 5


def token_rows(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(p * page_size, (p + 1) * page_size) for p in pages])


@pytest.mark.parametrize("page_size,item", [(64, (2, 8)), (1, (6, 3))])
def test_page_first_round_trip(page_size, item):
    """Save scattered device pages, load them elsewhere: same bytes, and nothing else is touched."""
    torch.manual_seed(0)
    k = [torch.randn(PAGES * page_size, *item) for _ in range(LAYERS)]
    v = [torch.randn(PAGES * page_size, *item) for _ in range(LAYERS)]
    hosts = [torch.zeros(PAGES, LAYERS, page_size, *item) for _ in range(2)]
    device_rows, host_rows = token_rows([4, 0, 2], page_size), token_rows([1, 3, 0], page_size)
    transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=k + v, dst_ptrs=hosts, src_indices=device_rows, dst_indices=host_rows, page_size=page_size
    )
    for layer in range(LAYERS):
        for tensors, host in ((k, hosts[0]), (v, hosts[1])):
            assert torch.equal(host[[1, 3, 0], layer].flatten(0, 1), tensors[layer][device_rows])
    assert not hosts[0][[2, 4]].any()

    targets = [torch.zeros(PAGES * page_size, *item) for _ in range(2)]
    new_rows = token_rows([0, 1, 3], page_size)
    transfer_kv_per_layer_direct_pf_lf(
        src_ptrs=hosts,
        dst_ptrs=targets,
        src_indices=host_rows,
        dst_indices=new_rows,
        layer_id=2,
        page_size=page_size,
    )
    assert torch.equal(targets[0][new_rows], k[2][device_rows])
    assert torch.equal(targets[1][new_rows], v[2][device_rows])
    assert not targets[0][token_rows([2, 4], page_size)].any()


def test_state_pool_with_one_more_host_dimension():
    """Mamba host pools keep a page dimension of one: [slots, layers, 1, ...]."""
    device = torch.randn(LAYERS, 4, 6, 3)
    host = torch.zeros(5, LAYERS, 1, 6, 3)
    transfer_kv_all_layer_direct_lf_pf(
        list(device), [host], torch.tensor([3, 1]), torch.tensor([0, 4]), page_size=1
    )
    assert torch.equal(host[[0, 4]].squeeze(2), device[:, [3, 1]].transpose(0, 1))
    back = torch.zeros(4, 6, 3)
    transfer_kv_per_layer_direct_pf_lf(
        [host], [back], torch.tensor([4]), torch.tensor([2]), layer_id=1, page_size=1
    )
    assert torch.equal(back[2], device[1, 1])


def test_layer_first_copy():
    src, dst = torch.randn(2, 8, 3), torch.zeros(2, 8, 3)
    transfer_kv_direct(list(src), list(dst), torch.tensor([1, 7]), torch.tensor([0, 2]), page_size=1)
    assert torch.equal(dst[:, [0, 2]], src[:, [1, 7]])
    assert not dst[:, [1, 3, 4, 5, 6, 7]].any()


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(LAYERS, 8, 6, 3), torch.randn(LAYERS, 8, 2, 4, 4)


def test_tracked_rows_are_copied_in_every_layer():
    conv, ssm = pools()
    old_conv, old_ssm = conv.clone(), ssm.clone()
    source, target = torch.tensor([1, 2, 3, 0], dtype=torch.int32), torch.tensor([5, 6, 7, 0])
    mask = torch.tensor([True, False, True, True])
    track_mamba_states_all_layers_cpu(conv, ssm, source, mask, target, batch_size=3)
    for new, old in ((conv, old_conv), (ssm, old_ssm)):
        assert torch.equal(new[:, [5, 7]], old[:, [1, 3]])
        assert torch.equal(new[:, [0, 1, 2, 3, 4, 6]], old[:, [0, 1, 2, 3, 4, 6]])


@pytest.mark.parametrize("source,target", [(-1, 4), (2, -1)])
def test_freed_slots_are_skipped(source, target):
    conv, ssm = pools()
    old = ssm.clone()
    one = torch.tensor([True])
    args = (torch.tensor([source]), one, torch.tensor([target]), 1)
    track_mamba_states_if_needed_cpu(conv[0], ssm[0], *args, check_freed_slots=True)
    assert torch.equal(ssm, old)


def test_one_layer_form():
    conv, ssm = pools()
    old = ssm.clone()
    one = torch.tensor([True])
    track_mamba_states_if_needed_cpu(conv[1], ssm[1], torch.tensor([2]), one, torch.tensor([4]), 1)
    assert torch.equal(ssm[1, 4], old[1, 2])
    assert torch.equal(ssm[0], old[0])
