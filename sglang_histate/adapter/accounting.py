"""What a request got from the cache, counted once, when it is in its first batch: tokens by tier, and what was missed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_histate.adapter.attribution import OF_MISS, Absences, Why, attribute
from sglang_histate.adapter.counters import Counters, HitTier, Miss
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.trust import Trust
from sglang_histate.store import CheckpointStore


class Accounting:
    """Scheduler thread only. Changes counters and what is remembered on the request, nothing else."""

    def __init__(
        self,
        store: CheckpointStore,
        absences: Absences,
        trust: Trust,
        counters: Counters,
        *,
        page_size: int,
        min_gain_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._absences = absences
        self._trust = trust
        self._counters = counters
        self._page_size = page_size
        self._min_gain_tokens = min_gain_tokens
        self._clock = clock

    def arrived(self, req: Any) -> None:
        """`req` enters the queue, perhaps again."""
        state = state_of(req, self._page_size)
        if state.arrived_s is None and not state.accounted:
            state.arrived_s = self._clock()

    def asked(self, req: Any, ready: bool) -> None:
        """`req` was asked whether it may be admitted; not `ready`: it waits for a read."""
        state = state_of(req, self._page_size)
        if not ready:
            if state.waits_since_s is None:
                state.waits_since_s = self._clock()
        elif state.waits_since_s is not None:
            self._counters.read_wait_s.add(self._clock() - state.waits_since_s)
            state.waits_since_s = None

    def admitted(self, req: Any) -> bool:
        """Account for what `req` resumes from. Return whether that is a checkpoint that was read for it."""
        state = state_of(req, self._page_size)
        counters, resumed = self._counters, int(req.prefix_len)
        if state.attached is not None and resumed < state.attached:
            counters.miss(Miss.NOT_LOADED)
        if not req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            if state.arrived_s is not None:
                counters.queue_s.add(self._clock() - state.arrived_s)
            counters.requests += 1
            counters.prompt_tokens += len(req.full_untruncated_fill_ids)
        state.arrived_s = None
        self._explain(req, state, resumed)
        if not resumed:
            return False
        # Stock counts KV behind a host-side state as host KV even where it never left the device.
        loaded = min(state.kv_loaded, resumed)
        req.cached_tokens_storage = min(state.kv_restored, loaded)
        req.cached_tokens_host = loaded - req.cached_tokens_storage
        req.cached_tokens_device = resumed - loaded
        counters.hit_kv_tokens[HitTier.DEVICE] += req.cached_tokens_device
        counters.hit_kv_tokens[HitTier.HOST] += req.cached_tokens_host
        counters.hit_kv_tokens[HitTier.SSD] += req.cached_tokens_storage
        from_ssd = state.attached == resumed
        state.resumed_from = (
            HitTier.SSD if from_ssd else HitTier.HOST if state.state_loaded else HitTier.DEVICE
        )
        counters.hits[state.resumed_from] += 1
        counters.hit_tokens[state.resumed_from] += resumed
        if from_ssd:
            state.restored_from_ssd = resumed
        return from_ssd

    def _explain(self, req: Any, state: RequestState, resumed: int) -> None:
        tokens = len(req.full_untruncated_fill_ids)
        reusable = min(state.kv_covered, tokens - 1) // self._page_size * self._page_size
        state.recomputed = attribute(
            resumed, reusable, self._page_size, lambda position: self._cause(req, state, position)
        )
        for part in state.recomputed:
            self._counters.recomputed[part.why] += part.tokens

    def _cause(self, req: Any, state: RequestState, position: int) -> Why | None:
        """Return why `req`, which resumes before `position`, cannot resume there; None where nothing was ever planned."""
        if position in (state.restorable, state.attached):
            return Why.NOT_LOADED
        if not state.may_ask:
            return Why.NOT_ASKED
        key = state.keys.at(req.full_untruncated_fill_ids, position)
        if self._store.find(key) is None:
            why = self._absences.why(key)
            return Why.FINGERPRINT if why is Why.QUARANTINED and self._trust.other_weights else why
        if self._store.lookup(key) is None:
            return Why.DISK_DOWN
        if position < state.restorable + self._min_gain_tokens:
            return Why.SMALL_GAIN
        return Why.LATE if state.missed is None else OF_MISS.get(state.missed, Why.LATE)
