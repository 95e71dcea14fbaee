"""SGLang's scheduler as verification sees it, around a rank without model: a queue, idle steps, a flush."""

from __future__ import annotations

from typing import Any

import torch

from sglang_histate.adapter.counters import Unverified
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of

from .engine import PAGE, request, tokens
from .stores import put
from .test_tier import Rank

A = tokens((1, 1024))
POSITION = 512


class Scheduler:
    """What verification uses of SGLang's scheduler, around a rank without model."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.cache = rank.engine.cache
        self.waiting: list[Any] = []
        self.busy = False
        self.flushes = 0
        self.now_s = 100.0
        rank.tier.verification._clock = lambda: self.now_s

    def handle_generate_request(self, recv: Any) -> None:
        assert recv.sampling_params.max_new_tokens == 1
        req = request(recv.input_ids, extra_key=recv.extra_key)
        req.rid = recv.rid
        self.arrive(req)

    def arrive(self, req: Any) -> None:
        self.cache.request_arrived(req)
        self.waiting.append(req)

    def abort_request(self, recv: Any) -> None:
        for req in [req for req in self.waiting if req.rid.startswith(recv.rid)]:
            self.waiting.remove(req)
            self.cache.release_aborted_request(req.cache_request_handle)

    def is_fully_idle(self) -> bool:
        return not self.waiting and not self.busy

    def flush_cache(self) -> bool:
        self.flushes += 1
        self.cache.reset()
        self.rank.engine.kv.clear()
        self.rank.engine.states.clear()
        return True

    def idle(self, seconds: float = 0.6) -> None:
        """One idle step, and some time after it."""
        self.cache.scheduler_idle(self)
        self.now_s += seconds

    def compute(self, value: float, start: int = 0, end: int | None = None) -> Any:
        """One prefill chunk of the request in the queue. All numbers of the state at its end are `value`."""
        (req,) = self.waiting
        assert self.cache.request_ready(req)
        req.prefix_len, req.extend_end = start, len(req.origin_input_ids) if end is None else end
        capture = self.cache.plan_capture([req])
        if capture is not None:
            (row,) = capture.rows
            layout = self.rank.engine.layout
            for views in layout.record_views(row.record.payload):
                parts = layout.codec.encode(torch.full((1, *layout.temporal_shape), value))
                for target, part in zip(views.temporal, parts, strict=True):
                    target.copy_(part[0])
                views.conv.fill_(value)
            capture.done = lambda: True
        if req.extend_end == len(req.origin_input_ids):
            self.waiting.remove(req)
            self.rank.tier.released(req)
        return capture

    def settle(self) -> None:
        self.rank.drain()


def restored(rank: Rank, value: float = 3.0, ids=A, position: int = POSITION) -> bytes:
    """A request resumes from a checkpoint whose numbers are all `value`."""
    key = PageKeys(PAGE, None, None).at(ids, position)
    if rank.store.lookup(key) is None:
        put(rank.store, rank.engine.layout, key, position, value)
        rank.drain()
    restored_already(rank, ids, position)
    return key


def restored_already(rank: Rank, ids: Any, position: int) -> None:
    req = request(ids)
    req.prefix_len, req.extend_end = position, len(ids)
    req.last_node = rank.engine.cache.tree_core.root_node.id
    state_of(req, PAGE).attached = position
    rank.tier._account(req)


def skipped(rank: Rank) -> dict[Unverified, int]:
    return {reason: count for reason, count in rank.counters.unverified.items() if count}


def start(scheduler: Scheduler) -> Any:
    """Be idle until the check begins; return its request."""
    for _ in range(4):
        scheduler.idle()
    (req,) = scheduler.waiting
    return req
