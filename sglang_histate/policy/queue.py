"""The order in which the units of one pool are evicted.

A heap that is corrected as late as possible. Its entries may be too low, never too high: a unit that became
more valuable (used again, a neighbour gone) stays where it is until it comes first, is priced then and goes
back. A unit that became less valuable is reported by the tree, and priced before the next victim is named. So
a request's touch costs the queue nothing, and a unit is priced once per change for the worse and about once
per residence, not once per use. Each of these takes O(log n), and the walk to the checkpoint before.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from sglang_histate.policy.prefix_nodes import Anchor, Checkpoint
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.recompute import COST_SCALE, price
from sglang_histate.policy.score import DEFAULT_TAU, Eviction, score
from sglang_histate.policy.units import Pool, Unit, bundle_extent, bundle_leaf, describe, last_access

Entry = tuple[float, int, Anchor]
"""Score when it was priced, sequence of the anchor (decides ties, older first), anchor."""

SMALL_HEAP = 64
"""Entries below which the heap is not worth compacting."""


class EvictionQueue:
    """Names the units of `pool` to evict, lowest score first, ties in the order they came into the tree.

    Args:
        tree: the mirror; it reports to the queue from now on, and what is in it already is queued.
        pool: whose units; one queue per pool.
        kv_token_bytes: bytes of KV per token of the model, > 0: the measure of M'.
        tau: accesses that a unit is worth whose loss costs as many tokens as its bytes hold, >= 0.
        mode: see `score.Eviction`.

    Raises:
        ValueError: `kv_token_bytes` or `tau` out of range.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: Pool,
        kv_token_bytes: int,
        tau: float = DEFAULT_TAU,
        mode: Eviction = Eviction.SCORE,
    ) -> None:
        if kv_token_bytes <= 0:
            raise ValueError(f"{kv_token_bytes} bytes of KV per token must be positive")
        if not 0 <= tau < float("inf"):
            raise ValueError(f"tau {tau} must be a finite number of accesses, not negative")
        self.pool = pool
        self.mode = mode
        self.tau = tau
        self._kv_token_bytes = kv_token_bytes
        self._share = tree.end_share
        self._priced_at = self._share.steps
        self._changed = tree.watch(pool.tier)
        self._heap: list[Entry] = []
        # The one valid entry of each unit, by sequence; every other entry in the heap is stale.
        self._valid: dict[int, Entry] = {}

    def __len__(self) -> int:
        """How many units there are, in use or not."""
        self._settle()
        return len(self._valid)

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        """Return the lowest unit that `usable` accepts, or None. It stays queued until the tree loses it."""
        self._settle()
        heap, valid = self._heap, self._valid
        refused: list[Entry] = []
        found = None
        while heap:
            entry = heap[0]
            sequence, anchor = entry[1], entry[2]
            if valid.get(sequence) is not entry:
                heappop(heap)
                continue
            now = self._score(anchor)
            if now != entry[0]:
                assert now is not None and now > entry[0], "the tree reports what gets cheaper"
                valid[sequence] = entry = (now, sequence, anchor)
                heapreplace(heap, entry)
                continue
            unit = self._unit(anchor, now)
            if usable(unit):
                found = unit
                break
            refused.append(heappop(heap))
        for entry in refused:
            heappush(heap, entry)
        return found

    def ranked(self) -> list[Unit]:
        """Return every unit in the order of eviction, O(n log n): for tests and explanations."""
        self._settle()
        entries = []
        for sequence, (_, _, anchor) in self._valid.items():
            now = self._score(anchor)
            assert now is not None
            entries.append((now, sequence, anchor))
        return [self._unit(anchor, now) for now, _, anchor in sorted(entries, key=lambda entry: entry[:2])]

    def _settle(self) -> None:
        """Price what the tree reported, or everything if q took another step."""
        heap, valid = self._heap, self._valid
        for sequence, anchor in self._changed.items():
            now = self._score(anchor)
            if now is None:
                valid.pop(sequence, None)
                continue
            old = valid.get(sequence)
            if old is None or now < old[0]:
                valid[sequence] = entry = (now, sequence, anchor)
                heappush(heap, entry)
        self._changed.clear()
        if self._priced_at != self._share.steps:
            self._priced_at = self._share.steps
            if self.mode is Eviction.SCORE:
                for sequence, (_, _, anchor) in valid.items():
                    now = self._score(anchor)
                    assert now is not None
                    valid[sequence] = (now, sequence, anchor)
                self._compact()
        elif len(heap) > 2 * len(valid) + SMALL_HEAP:
            self._compact()

    def _compact(self) -> None:
        self._heap[:] = self._valid.values()
        heapify(self._heap)

    def _measure(self, anchor: Anchor) -> tuple[int, int]:
        """Bytes the pool gets back (0: no candidate) and tick of the last access."""
        pool = self.pool
        freed = 0
        if isinstance(anchor, Checkpoint) and anchor.tiers >> pool.tier & 1:
            freed = pool.state_bytes
        leaf = bundle_leaf(anchor, pool.tier)
        if leaf is not None and pool.kv_token_bytes:
            freed += bundle_extent(leaf, pool.tier).tokens * pool.kv_token_bytes
        if not freed:
            return 0, 0
        return freed, last_access(anchor, leaf, pool.kv_token_bytes > 0, self.mode)

    def _score(self, anchor: Anchor) -> float | None:
        """H now, or None if the anchor has no unit in this pool."""
        freed, accessed = self._measure(anchor)
        if not freed:
            return None
        if self.mode is not Eviction.SCORE or not isinstance(anchor, Checkpoint):
            return float(accessed)
        return score(accessed, price(anchor, self._priced_at), freed, self._kv_token_bytes, self.tau)

    def _unit(self, anchor: Anchor, now: float) -> Unit:
        freed, accessed = self._measure(anchor)
        cost = price(anchor, self._share.steps) / COST_SCALE if isinstance(anchor, Checkpoint) else 0.0
        return describe(anchor, self.pool, freed, cost, accessed, now)
