"""Agreement between tensor-parallel ranks: nobody acts on what only its own disk has finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")


def finished_count(items: Iterable[Item], finished: Callable[[Item], bool]) -> int:
    """Return how many of `items`, oldest first and without a gap, have finished here."""
    return sum(1 for _ in takewhile(finished, items))


class RankAgreement:
    """Minimum over the ranks that share one radix cache. A plain copy with one rank."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        # With attention data parallelism, context-parallel peers share batches although the cache's own group has one rank.
        groups = (cache.attn_cp_group, cache.attn_tp_group)
        self._groups = [
            group
            for group in groups
            if group is not None and torch.distributed.get_world_size(group=group) > 1
        ]
        if not self._groups and cache.tp_world_size > 1:
            self._groups = [cache.tp_group]
        self._alone = not self._groups

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum. Every rank must call it in the same step with as many values."""
        if self._alone:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        self._cache._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
        return [int(value) for value in tensor.tolist()]

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks. Every rank must call it in the same step."""
        return -self.minimum([-number])[0]

    def common(self, items: Sequence[Item]) -> list[Item]:
        """Return what every rank has of `items` (hashable), in the order of the first rank, on every rank.

        For the start only: the items travel whole. Every rank must call it in the same step.
        """
        held = list(items)
        for group in self._groups:
            gathered: list[Any] = [None] * torch.distributed.get_world_size(group=group)
            torch.distributed.all_gather_object(gathered, held, group=group)
            first, *others = gathered
            everywhere = set(first).intersection(*others)
            held = [item for item in first if item in everywhere]
        return held
