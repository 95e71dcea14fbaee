"""Evictions on the host: the ranking says what goes, KV and states from one arena alike."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

from sglang_histate.adapter.counters import Why
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Unit


class HostWalk:
    """One walk; what it frees is collected for SGLang, which gives it back to the arena after the walk."""

    def __init__(
        self,
        core: Any,
        ranking: Ranking,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: list[Any],
    ) -> None:
        self._core = core
        self._ranking = ranking
        self._tracker = tracker
        self._frees = (device_frees, host_frees, cache_actions)
        self._cache_actions = cache_actions

    def free(self, pages: int) -> None:
        """Evict until `pages` arena pages are free more than before, or until nothing more can go.

        First the intermediate checkpoints that only pass through: the SSD has them, so losing them costs one read. Then
        bundles in the order of the ranking; what the SSD will have soon waits for it while there are others.
        """
        states = self._core.host_lru_lists[ComponentType.MAMBA]
        node = states.get_lru_no_host_lock()
        while node is not None and states.in_list(node) and self._freed() < pages:
            following = states.get_prev_no_host_lock(node)
            if self._ranking.passes_through(node):
                self._drop_state(node)
            node = following
        while self._freed() < pages:
            unit = self._ranking.host.victim(self._needs_no_write) if self._ranking.clean_pages else None
            if unit is None:
                unit = self._ranking.host.victim(self._usable)
            if unit is None:
                return
            self._ranking.evicted(unit, Tier.HOST)
            if unit.kind is Kind.INTERMEDIATE:
                assert unit.checkpoint is not None
                self._note_lost(unit.checkpoint)
                self._drop_state(self._core.node_by_id(unit.checkpoint[0]))
            else:
                self._drop_bundle(unit)

    def _freed(self) -> int:
        return self._ranking.host_pages(
            kv_tokens=self._tracker[ComponentType.FULL], states=self._tracker[ComponentType.MAMBA]
        )

    def _note_lost(self, place: tuple[Any, int]) -> None:
        """A checkpoint that only the host has is about to go: who asks for it is told why it is not there."""
        key = self._ranking.ssd.marks.known_at(*place)
        elsewhere = any(self._ranking.has_checkpoint(place, tier) for tier in (Tier.DEVICE, Tier.SSD))
        if key is not None and not elsewhere:
            self._ranking.absences.note(key, Why.EVICTED)

    def _drop_state(self, node: Any) -> None:
        self._core.drop_state(node, EvictLayer.HOST, self._tracker, *self._frees)

    def _drop_bundle(self, unit: Unit) -> None:
        """The KV goes, deepest node first, and the states on it; it ends where something else needs the rest."""
        if unit.cut is not None:
            node_id, offset = unit.cut
            self._cache_actions += self._core.cut(self._core.node_by_id(node_id), offset)[1]
        for node in [self._core.node_by_id(node_id) for node_id in unit.nodes]:
            if node not in self._core.evictable_host_leaves:
                return
            let_go = (
                self._core.make_dead if self._ranking.ssd.has_kv(node.id) else self._core._evict_host_leaf
            )
            let_go(node, self._tracker, *self._frees)

    def _needs_no_write(self, unit: Unit) -> bool:
        """Usable, and nothing is lost that a spill would save."""
        if not self._usable(unit):
            return False
        if unit.kind is Kind.INTERMEDIATE or unit.checkpoint is None:
            return True
        ssd = self._ranking.ssd
        saved = all(ssd.has_kv(node) or node not in ssd.names for node in unit.nodes)
        return saved or not self._ranking.has_checkpoint(unit.checkpoint, Tier.SSD)

    def _usable(self, unit: Unit) -> bool:
        if unit.kind is Kind.BUNDLE:
            return self._core.node_by_id(unit.nodes[0]) in self._core.evictable_host_leaves
        assert unit.checkpoint is not None
        node = self._core.node_by_id(unit.checkpoint[0])
        state = node.component_data[ComponentType.MAMBA]
        return state.host_value is not None and state.host_lock_ref == 0 and node.load_back_pending_id is None
