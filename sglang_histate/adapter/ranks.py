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
        self._alone = cache.tp_world_size == 1 and all(
            group is None or torch.distributed.get_world_size(group=group) == 1 for group in groups
        )

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum. Every rank must call it in the same step with as many values."""
        if self._alone:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        self._cache._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
        return [int(value) for value in tensor.tolist()]
