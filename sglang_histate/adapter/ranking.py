"""The eviction ranking of one rank: the policy's mirror of SGLang's radix tree, and one queue per pool.

The tree core reports nodes and where their data is, the cache reports accesses; all of it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.ssd_marks import SsdMarks
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit

_KV_DEVICE, _KV_HOST, _STATE_DEVICE, _STATE_HOST = 1, 2, 4, 8


@dataclass(frozen=True)
class Sizes:
    """Of one rank. `state`: bytes of one checkpoint, `kv_token`: bytes of the KV of one token, `page`: tokens of a page."""

    state: int
    kv_token: int
    page: int

    @property
    def state_pages(self) -> int:
        """Pages that a checkpoint takes in the host arena."""
        return -(-self.state // (self.kv_token * self.page))


class Ranking:
    """Scheduler thread only. `one_pool`: KV and states share the device's bytes."""

    def __init__(
        self,
        root: Any,
        *,
        sizes: Sizes,
        mode: Eviction,
        tau: float,
        one_device_pool: bool,
        one_host_pool: bool,
    ) -> None:
        self._sizes = sizes
        self._mode = mode
        self._tau = tau
        self._one_device_pool = one_device_pool
        self._one_host_pool = one_host_pool
        # Called with the key of each SSD checkpoint whose KV has left the tree.
        self.forget: Callable[[bytes], object] = lambda key: None
        self.clock = 0
        # All names from the start, so that a dashboard never misses a series.
        self.evictions = {f"{tier.name.lower()}_{kind.value}": 0 for tier in Tier for kind in Kind}
        # Of all victims so far: two ranks with the same number have evicted the same.
        self.digest = 0
        self.residence = Residence()
        self.reset(root)

    def reset(self, root: Any) -> None:
        """Start again with an empty tree. The clock goes on."""
        self.tree = PrefixTree(root)
        self.marks = SsdMarks()
        self._where: dict[Any, int] = {root: 0}
        self._since: dict[Any, int] = {}  # node -> when it came, oldest first but for splits
        self._ssd_since: dict[bytes, int] = {}
        self._homeless: dict[bytes, None] = {}  # on the SSD, but no node of the tree has their KV
        state, kv = self._sizes.state, self._sizes.kv_token
        self.device_kv = self._queue(Pool(Tier.DEVICE, state if self._one_device_pool else 0, kv))
        self.device_states = (
            self.device_kv if self._one_device_pool else self._queue(Pool(Tier.DEVICE, state, 0))
        )
        self.host = self._queue(Pool(Tier.HOST, state if self._one_host_pool else 0, kv))
        self.ssd = self._queue(Pool(Tier.SSD, state, 0))

    def _queue(self, pool: Pool) -> EvictionQueue:
        return EvictionQueue(self.tree, pool, self._sizes.kv_token, self._tau, self._mode)

    def host_pages(self, *, kv_tokens: int, states: int) -> int:
        """Return the pages that KV and states take in the host arena; `kv_tokens` in whole pages."""
        return kv_tokens // self._sizes.page + states * self._sizes.state_pages

    def on_ssd(self, node: Any) -> bool:
        """Return whether the SSD has the state at the end of `node`."""
        checkpoints = self.tree.checkpoints(node.id)
        return bool(checkpoints) and checkpoints[-1][0] == len(node.key) and Tier.SSD in checkpoints[-1][1]

    # What the tree core reports.

    def sync(self, node: Any) -> None:
        """Take over where `node`'s data is; a node seen for the first time is new."""
        before = self._where.get(node.id)
        if before is None:
            if not self._is_in_tree(node):
                return
            self.tree.add(node.id, node.parent.id, len(node.key))
            self._since[node.id] = self.clock
            before = 0
        full, state = node.component_data[ComponentType.FULL], node.component_data[ComponentType.MAMBA]
        now = (
            _KV_DEVICE * (full.value is not None)
            + _KV_HOST * (full.host_value is not None)
            + _STATE_DEVICE * (state.value is not None)
            + _STATE_HOST * (state.host_value is not None)
        )
        self._where[node.id] = now
        changed = now ^ before
        if not changed or node.parent is None:
            return
        for bit, tier in ((_KV_DEVICE, Tier.DEVICE), (_KV_HOST, Tier.HOST)):
            if changed & bit:
                self.tree.set_kv(node.id, tier, bool(now & bit))
        for bit, tier in ((_STATE_DEVICE, Tier.DEVICE), (_STATE_HOST, Tier.HOST)):
            if changed & bit:
                self.tree.set_checkpoint(node.id, len(node.key), tier, bool(now & bit))

    def _is_in_tree(self, node: Any) -> bool:
        parent = node.parent
        if parent is None or parent.id not in self._where:
            return False
        return parent.children.get(node.key.child_key(self._sizes.page)) is node

    def split(self, child: Any, upper: Any) -> None:
        """`upper` is the new parent of `child` and has the first of its tokens."""
        self.tree.split(child.id, upper.id, len(upper.key))
        self.marks.split(child.id, upper.id, len(upper.key))
        kv = _KV_DEVICE | _KV_HOST
        self._where[upper.id] = self._where[child.id] & kv
        self._since[upper.id] = self._since[child.id]
        self.sync(upper)
        self.sync(child)

    def removed(self, node: Any) -> None:
        """`node` is no longer in the tree: no tier has its KV, so its checkpoints are of no use."""
        self._where.pop(node.id)
        self.residence.kv.evicted(self._since.pop(node.id), self.clock)
        self.tree.remove(node.id)
        for _, key in self.marks.removed(node.id):
            self.forget(key)

    # What the cache reports.

    def admitted(self, node: Any) -> None:
        """A request is admitted, which is one tick of the clock, and resumes at the end of `node` (the root: nowhere)."""
        self.clock += 1
        if node.parent is not None:
            self.tree.observe_hit(node.id, len(node.key))
        self.used(node)

    def used(self, node: Any) -> None:
        """A running request needs everything up to the end of `node`, which it may just have added."""
        offset = len(node.key) if node.parent is not None else 0
        self.tree.touch(node.id, offset, self.clock)

    def placed(self, key: bytes, node: Any, offset: int, stored: bool) -> None:
        """The SSD checkpoint `key` belongs `offset` tokens into `node`; `stored`: the SSD has it already."""
        self.marks.place(key, node.id, offset)
        self._homeless.pop(key, None)
        if stored:
            self.tree.set_checkpoint(node.id, offset, Tier.SSD, True)

    # What the store reports and asks. Only the mirror changes, never the store.

    def stored(self, key: bytes) -> None:
        """The SSD tier has `key` now."""
        self._ssd_since[key] = self.clock
        place = self.marks.find(key)
        if place is None:
            self._homeless[key] = None
        else:
            self.tree.set_checkpoint(*place, Tier.SSD, True)

    def gone(self, key: bytes, replaced: bool) -> None:
        """The SSD tier has `key` no more; `replaced`: its slab was needed."""
        since = self._ssd_since.pop(key, None)
        if replaced and since is not None:
            self.residence.state.evicted(since, self.clock)
        self._homeless.pop(key, None)
        place = self.marks.find(key)
        if place is not None:
            self.tree.set_checkpoint(*place, Tier.SSD, False)
            self.marks.drop(key)

    def ssd_victim(self, usable: Callable[[bytes], bool]) -> bytes | None:
        """Return the key of the SSD checkpoint whose loss costs least: one without KV in the tree, or by rank."""
        homeless = next((key for key in self._homeless if usable(key)), None)
        if homeless is not None:
            return homeless
        unit = self.ssd.victim(lambda unit: usable(self._key(unit)))
        if unit is None:
            return None
        self.evicted(unit, Tier.SSD)
        return self._key(unit)

    def _key(self, unit: Unit) -> bytes:
        assert unit.checkpoint is not None
        return self.marks.key_at(*unit.checkpoint)

    # Pressure.

    def pressure(self) -> float:
        """Return how long KV stays in the cache over how long checkpoints stay on the SSD."""
        oldest_kv = next(iter(self._since.values()), None)
        oldest_state = next(iter(self._ssd_since.values()), None)
        return self.residence.pressure(self.clock, oldest_kv, oldest_state)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the status. Times are requests."""
        oldest_kv = next(iter(self._since.values()), None)
        oldest_state = next(iter(self._ssd_since.values()), None)
        return {
            "mode": self._mode.value,
            "tau_requests": self._tau,
            "clock_requests": self.clock,
            "kv_residence_requests": self.residence.kv.mean(self.clock, oldest_kv),
            "state_residence_requests": self.residence.state.mean(self.clock, oldest_state),
            "pressure": self.pressure(),
            "end_hit_share": self.tree.end_share.value,
            "evictions_total": dict(self.evictions),
            "victims_digest": self.digest,
        }

    def evicted(self, unit: Unit, tier: Tier) -> None:
        """Count an eviction by tier and kind."""
        self.evictions[f"{tier.name.lower()}_{unit.kind.value}"] += 1
        victim = f"{self.digest} {int(tier)} {unit.checkpoint} {unit.nodes}"
        self.digest = crc32(victim.encode())

    def check(self, nodes: list[Any]) -> None:
        """Assert that the mirror is the tree. `nodes`: all of the tree's but the root. For tests."""
        assert {node.id for node in nodes} == set(self._where) - {self.tree.root}
        for node in nodes:
            assert self.tree.parent(node.id) == node.parent.id and self.tree.tokens(node.id) == len(node.key)
            full, state = node.component_data[ComponentType.FULL], node.component_data[ComponentType.MAMBA]
            assert self.tree.has_kv(node.id, Tier.DEVICE) == (full.value is not None)
            assert self.tree.has_kv(node.id, Tier.HOST) == (full.host_value is not None)
            at_end = dict(self.tree.checkpoints(node.id)).get(len(node.key), ())
            assert (Tier.DEVICE in at_end) == (state.value is not None)
            assert (Tier.HOST in at_end) == (state.host_value is not None)


def attach_ranking(
    cache: Any,
    *,
    sizes: Sizes,
    mode: Eviction,
    tau: float,
    one_device_pool: bool = False,
    one_host_pool: bool = False,
) -> Ranking:
    """Give an empty cache its ranking: the tree core reports to it, the components ask it."""
    core = cache.tree_core
    ranking = Ranking(
        core.root_node.id,
        sizes=sizes,
        mode=mode,
        tau=tau,
        one_device_pool=one_device_pool,
        one_host_pool=one_host_pool,
    )
    core.ranking = ranking
    for component in cache.components.values():
        component.ranking = ranking
    return ranking
