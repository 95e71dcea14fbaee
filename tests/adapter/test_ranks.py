"""What two real processes agree on at the start."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.multiprocessing as processes

from sglang_histate.adapter.ranks import RankAgreement

FOUND = {0: ["c", "a", "b", "e"], 1: ["a", "b", "c", "d"]}


def _rank(number: int, address: str, answers) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    group = torch.distributed.group.WORLD

    def reduce(tensor, op) -> None:
        torch.distributed.all_reduce(tensor, op=op, group=group)

    cache = SimpleNamespace(
        tp_world_size=2,
        tp_group=group,
        attn_cp_group=None,
        attn_tp_group=group,
        _all_reduce_attn_groups=reduce,
    )
    agreement = RankAgreement(cache)
    answers.put((number, agreement.common(FOUND[number]), agreement.largest(10 + number)))
    torch.distributed.destroy_process_group()


def test_what_all_have_in_the_order_of_the_first(tmp_path) -> None:
    context = processes.get_context("spawn")
    answers = context.SimpleQueue()
    address = f"file://{tmp_path}/meet"
    ranks = [context.Process(target=_rank, args=(number, address, answers)) for number in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0, sys.stderr
    assert sorted(answers.get() for _ in ranks) == [(0, ["c", "a", "b"], 11), (1, ["c", "a", "b"], 11)]


def test_alone() -> None:
    cache = SimpleNamespace(tp_world_size=1, attn_cp_group=None, attn_tp_group=None)
    assert RankAgreement(cache).common([3, 1]) == [3, 1] and RankAgreement(cache).largest(7) == 7
