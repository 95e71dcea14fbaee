"""SGLang's unified radix cache with HiState behind it.

Only what must differ is overridden; KV, locks, matching and load-back are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_histate.adapter.capture import ForwardCapture
from sglang_histate.adapter.explanations import Explanations
from sglang_histate.adapter.one_pool import OnePool
from sglang_histate.adapter.policy_time import Part, PolicyTime
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.tier import SsdTier
from sglang_histate.copy import Chosen
from sglang_histate.copy.packing import Packing

if TYPE_CHECKING:
    from sglang_histate.adapter.metrics import MetricsExport


class HiStateCache(UnifiedRadixCache):
    """See the module docstring. Without a tier (while the base class builds itself) it behaves as stock."""

    tier: SsdTier | None = None
    status_facts: dict[str, Any] | None = None
    # None where nobody may ask: on ranks that do not answer, or if the user wants none.
    explanations: Explanations | None = None
    # None where KV and states have a fixed share each.
    one_pool: OnePool | None = None
    # Writes what a restart should find, at a graceful exit; None where nothing is kept.
    save: Callable[[], None] | None = None
    # None where nothing is told to Prometheus.
    metrics: MetricsExport | None = None
    # What moves bytes between device and host and what packs records; None while the base class builds itself.
    copies: Chosen | None = None
    packing: Packing | None = None
    # Tokens: a prefill chunk that does not end the prompt is cut to a multiple of it.
    capture_grid: int = 1
    # Tokens of a step that only a prompt which ends with them may take.
    step_tail: int = 0

    @property
    def policy_time(self) -> PolicyTime:
        ranking: Ranking = self.tree_core.ranking
        return ranking.policy_time

    def plan_capture(self, reqs: list[Any]) -> ForwardCapture | None:
        """Called with each prefill batch before its forward pass."""
        if self.tier is None:
            return None
        capture: ForwardCapture | None = self.policy_time.run(Part.PLAN, self.tier.plan_batch, reqs)
        if self.explanations is not None:
            for req in reqs:
                self.policy_time.run(Part.EXPLAIN, self.explanations.admitted, req)
        return capture

    def request_arrived(self, req: Any) -> None:
        """Called when a request enters the waiting queue: start reading what it will need."""
        if self.tier is not None and not self.tier.verification.arrived(req):
            self.tier.accounting.arrived(req)
            self.policy_time.run(Part.LOOKUP, self.tier.fault_ins.arrived, req)

    def request_ready(self, req: Any) -> bool:
        """Called before a waiting request is admitted. False: skip it in this step, a checkpoint is on its way."""
        if self.tier is None or self.tier.verification.trust.tree_doubted or self.tier.verification.owns(req):
            return True
        ready: bool = self.policy_time.run(Part.LOOKUP, self.tier.fault_ins.ready, req)
        self.tier.accounting.asked(req, ready)
        return ready

    def scheduler_idle(self, scheduler: Any) -> None:
        """Called in each step in which the scheduler found nothing to run."""
        if self.tier is not None:
            self.tier.verification.idle(scheduler)

    def is_internal(self, req: Any) -> bool:
        """Return whether nobody waits for an answer to `req`."""
        return self.tier is not None and self.tier.verification.owns(req)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if self.tier is not None and self.tier.verification.trust.tree_doubted:
            params = replace(params, key=params.key[:0])
        return super().match_prefix(params)

    def release_aborted_request(self, request: Any) -> None:
        if self.tier is not None:
            self.tier.fault_ins.cancel(request)
            self.tier.verification.gone(request)
        super().release_aborted_request(request)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self.tier is not None and not checkpointed:
            self.tier.released(req)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.tier is not None:
            self.policy_time.run(Part.TICK, self.tier.tick)
        if self.metrics is not None:
            self.metrics.tick()

    def loading_check(self, finish_count: int | None = None) -> None:
        loaded = []
        if finish_count and self.cache_controller is not None:
            acks = self.cache_controller.ack_load_queue[:finish_count]
            loaded = [node_id for ack in acks for node_id in ack.node_ids]
        super().loading_check(finish_count)
        for node_id in loaded:
            self.components[ComponentType.MAMBA].drop_loaded_host_state(node_id)

    def load_back(self, node_id: Any, mem_quota: int | None = None, req: Any = None) -> bool:
        if not self.components[ComponentType.MAMBA].has_room_to_load(node_id, req):
            return False  # the request is computed from what is on the device
        return super().load_back(node_id, mem_quota, req)

    def init_load_back(self, params: Any) -> Any:
        loaded_kv = 0
        on_host = self.tree_core.component_has_host_value_only(params.best_match_node, ComponentType.MAMBA)
        node = self.tree_core.node_by_id(params.best_match_node)
        while node.evicted:
            loaded_kv += len(node.key)
            node = node.parent
        result = super().init_load_back(params)
        if result is not None and result[0] > 0:
            state = state_of(params.req, self.page_size)
            state.kv_loaded, state.state_loaded = loaded_kv, on_host
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.tier is None:
            return
        self.policy_time.run(Part.PUBLISH, self.tier.published, req)
        if req.finished():
            self.policy_time.run(Part.PUBLISH, self.tier.finished, req)
            if self.explanations is not None:
                self.policy_time.run(Part.EXPLAIN, self.explanations.finished, req)

    def evict_host(self, num_tokens: int, component_type: Any = ComponentType.FULL) -> int:
        """Free room in the host arena for `num_tokens` tokens (or states); return for how many there is now more room.

        KV and states share the arena, so either kind may have gone.
        """
        face = self.host_pool_group.get_pool(
            PoolName.KV if component_type is ComponentType.FULL else PoolName.MAMBA
        )
        before = face.available_size()
        super().evict_host(num_tokens, component_type)
        return int(face.available_size() - before)

    def reset(self) -> None:
        self._drain_transfers()
        if self.tier is not None:
            self.tier.reset()
        if self.explanations is not None:
            self.explanations.reset()
        super().reset()

    def _drain_transfers(self) -> None:
        """SGLang forgets transfers that are under way; they still write to pages that are about to be given away."""
        if self.cache_controller is not None:
            self.cache_controller.l2_transfer_engine.drain()

    def release_host_resources(self) -> None:
        self._drain_transfers()
        if self.tier is not None:
            if self.save is not None:
                self.save()
            # First the threads that write to the host pools, then the pools.
            self.tier.close()
        super().release_host_resources()

    def shutdown(self) -> None:
        if self.tier is not None:
            self.tier.close()
        super().shutdown()
