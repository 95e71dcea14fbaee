"""The order in which the units of one pool are evicted.

A heap that is corrected as late as possible. Its entries may be too low, never too high: a unit that became
more valuable (used again, a neighbour gone) stays where it is until it comes first, and goes back then, with
its new time at once and with its new price when that is not enough. A unit that became less valuable is
reported by the tree, and priced before the next victim is named. So a request's touch costs the queue
nothing, and a unit is moved once per change for the worse and about once per residence, not once per use.
Each of these takes O(log n), and the walk to the checkpoint before.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from sglang_histate.policy.prefix_nodes import Anchor, Checkpoint, Node, last_above, position
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.recompute import COST_SCALE, END_STEPS, WEIGHT_BITS
from sglang_histate.policy.score import DEFAULT_TAU, Eviction, loss_value, value
from sglang_histate.policy.units import (
    Kind,
    Pool,
    Unit,
    bundle_nodes,
    bundle_tokens,
    bundle_top,
    has_tail,
)

Entry = tuple[float, int, Anchor, float]
"""Score when it was last corrected, sequence of the anchor (decides ties, older first), anchor, and the part
of the score that is not the last access."""


Appraisal = tuple[float, float, int, int, int, Node | None, int]
"""What a unit is worth now: score, the part of it that is not the last access, tick of the last access, bytes
it frees, price, KV leaf of a bundle, position of the checkpoint before."""

SMALL_HEAP = 64
"""Entries below which the heap is not worth compacting."""


class EvictionQueue:
    """Names the units of `pool` to evict, lowest score first, ties in the order they came into the tree.

    What the tree reports waits until `victim` or `len` is called: call one of them now and then, also while
    there is room, or the reports of a long quiet time pile up.

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
        # Plain integers: an enum's shifts are slow, and this is asked for every price.
        self._tier, self._bit = int(pool.tier), 1 << pool.tier
        self._state_bit = self._bit if pool.state_bytes else 0
        self._state_bytes, self._kv_bytes = pool.state_bytes, pool.kv_token_bytes
        self._score = mode.priced
        self._value = loss_value if mode is Eviction.LOSS else value
        self._refresh = mode is not Eviction.LRU
        self._share = tree.end_share
        self._priced_at = self._share.steps
        self._changed = tree.watch(pool.tier)
        self._heap: list[Entry] = []
        # The one valid entry of each unit, by sequence; every other entry in the heap is stale.
        self._valid: dict[int, Entry] = {}
        # Those of them, by sequence, whose last part is out of date: only the score is a bound.
        self._unsure: dict[int, None] = {}

    def __len__(self) -> int:
        """How many units there are, in use or not."""
        self._settle()
        return len(self._valid)

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        """Return the lowest unit that `usable` accepts, or None. It stays queued until the tree loses it."""
        self._settle()
        heap, valid = self._heap, self._valid
        unsure, refresh, appraise = self._unsure, self._refresh, self._appraise
        refused: list[Entry] = []
        found = None
        while heap:
            entry = heap[0]
            key, sequence, anchor, worth = entry
            if valid.get(sequence) is not entry:
                heappop(heap)
                continue
            # Most entries that come first were used since. Their price can only be higher: a bound will do.
            sure = refresh and sequence not in unsure
            if sure and (at_least := anchor.used() + worth) > key:
                valid[sequence] = entry = (at_least, sequence, anchor, worth)
                heapreplace(heap, entry)
                continue
            now = appraise(anchor)
            if now is None:
                del valid[sequence]
                continue
            unsure.pop(sequence, None)
            if now[0] != key or now[1] != worth:
                valid[sequence] = entry = (now[0], sequence, anchor, now[1])
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
        found = []
        for sequence, entry in self._valid.items():
            now = self._appraise(entry[2])
            assert now is not None
            found.append((now[0], sequence, self._unit(entry[2], now)))
        return [unit for _, _, unit in sorted(found, key=lambda one: one[:2])]

    def _settle(self) -> None:
        """Price what the tree reported, or everything if q took another step."""
        heap, valid = self._heap, self._valid
        unsure = self._unsure
        for sequence, anchor in self._changed.items():
            old = valid.get(sequence)
            if isinstance(anchor, Checkpoint):
                if anchor.node is None:
                    if old is not None:
                        del valid[sequence]
                        unsure.pop(sequence, None)
                    continue
                used = anchor.used() if self._refresh else anchor.accessed
                if old is not None and used >= old[0] and anchor.tiers & self._state_bit:
                    # Used so much later that the entry is too low at any price: every turn of a session makes
                    # all its checkpoints a little cheaper, just when all are used.
                    unsure[sequence] = None
                    continue
                now = self._appraise(anchor)
            else:
                now = self._appraise_tail(anchor)
            if now is None:
                if old is not None:
                    del valid[sequence]
                    unsure.pop(sequence, None)
                continue
            unsure.pop(sequence, None)
            if old is None or now[0] < old[0] or now[1] < old[3]:
                valid[sequence] = entry = (now[0], sequence, anchor, now[1])
                if heap and valid.get(heap[0][1]) is not heap[0]:
                    heapreplace(heap, entry)  # most often the last victim is first, and gone
                else:
                    heappush(heap, entry)
        self._changed.clear()
        if self._priced_at != self._share.steps:
            self._priced_at = self._share.steps
            if self._score:
                for sequence, old in valid.items():
                    now = self._appraise(old[2])
                    assert now is not None
                    valid[sequence] = (now[0], sequence, old[2], now[1])
                unsure.clear()
                self._compact()
        elif len(heap) > 2 * len(valid) + SMALL_HEAP:
            self._compact()

    def _compact(self) -> None:
        self._heap[:] = self._valid.values()
        heapify(self._heap)

    def _appraise(self, anchor: Anchor) -> Appraisal | None:
        """What the anchor's unit is worth now, None if it has none in this pool or would free nothing."""
        if not isinstance(anchor, Checkpoint):
            return self._appraise_tail(anchor)
        node = anchor.node
        if node is None:
            return None
        # This runs several times per eviction, so it spells out what small functions do elsewhere.
        offset = anchor.offset
        leaf = None
        if offset == node.tokens and node.kv & self._bit:
            below = node.kv_children
            if below is None or not below[self._tier]:
                leaf = node
        freed = self._state_bytes if anchor.tiers & self._bit else 0
        if not freed and leaf is None:
            return None  # also the root's, which no tier holds
        held = node.checkpoints
        before = last_above(node) if held[0] is anchor else held[held.index(anchor) - 1]
        limit = before.node.start + before.offset  # type: ignore[union-attr]
        # Without refreshing, a hit further down uses the KV here, but not the state.
        accessed = anchor.accessed
        if self._refresh or (leaf is not None and self._kv_bytes):
            last = node.read_to_end if node.read_to is None else node.used_to(offset)
            if last > accessed:
                accessed = last
        if leaf is not None and self._kv_bytes:
            freed += bundle_tokens(leaf, self._tier, limit) * self._kv_bytes
        if not freed:
            return None
        steps = self._priced_at
        cost = (node.start + offset - limit) * (
            (END_STEPS - steps) * anchor.region + ((steps * anchor.ends) << WEIGHT_BITS)
        )
        worth = self._value(cost, freed, self._kv_token_bytes, self.tau) if self._score else 0.0
        return accessed + worth, worth, accessed, freed, cost, leaf, limit

    def _appraise_tail(self, leaf: Node) -> Appraisal | None:
        """The same for KV after the last checkpoint."""
        if not leaf.kv & self._bit or not self._kv_bytes or not has_tail(leaf, self._tier):
            return None
        limit = position(leaf.checkpoints[-1] if leaf.checkpoints else last_above(leaf))
        freed = bundle_tokens(leaf, self._tier, limit) * self._kv_bytes
        return float(leaf.read_to_end), 0.0, leaf.read_to_end, freed, 0, leaf, limit

    def _unit(self, anchor: Anchor, appraisal: Appraisal) -> Unit:
        score, _, accessed, freed, cost, leaf, limit = appraisal
        checkpoint, has_state = None, False
        if isinstance(anchor, Checkpoint):
            assert anchor.node is not None
            checkpoint, has_state = (anchor.node.id, anchor.offset), bool(anchor.tiers & self._bit)
        kind, cut = Kind.INTERMEDIATE, None
        nodes: tuple[int, ...] = ()
        if leaf is not None:
            top = bundle_top(leaf, self._tier, limit)
            kind, nodes = Kind.BUNDLE, bundle_nodes(leaf, top)
            cut = (top.id, limit - top.start) if top.start < limit else None
        tokens = cost / COST_SCALE
        return Unit(kind, self.pool.tier, checkpoint, has_state, nodes, cut, freed, tokens, accessed, score)
