"""Some of the prefixes that were restored through the SSD are computed again while the server is idle, and compared.

    restored (tokens are kept) -> idle for a second -> an internal request computes the prefix from nothing, and its state
    is captured like any other -> the stored checkpoint is read -> the two are compared -> equal, or the end of all trust

A request that arrives meanwhile waits for one prefill chunk at most: the check is cancelled and begins anew later. Only
tokens are kept for the samples that wait, and only a few. All decisions are the same on all ranks: which restores are
sampled is a hash, the time of idleness is agreed, and the ranks share what the comparison found.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_histate.adapter import internal_request
from sglang_histate.adapter.capture import CaptureRow
from sglang_histate.adapter.counters import Counters, Unverified
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.state_compare import Difference, compare
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.adapter.trust import Trust
from sglang_histate.policy.sampling import is_sampled
from sglang_histate.store import CheckpointStore, MissReason, ReadTicket, Record

MAX_PENDING = 8
# 8 bytes a token: all pending samples take 4 MiB at most. Computing as many takes some seconds on one GPU.
MAX_TOKENS = 1 << 16
# Most pauses of a busy server end sooner, and a check that is cancelled was for nothing.
IDLE_S = 1.0
MAX_TRIES = 5
# Steps of an idle scheduler: what is not admitted by then will not be.
MAX_STEPS_QUEUED = 1000


@dataclass(eq=False)
class _Sample:
    namespace: bytes  # whose tokens these are
    key: bytes
    tokens: array  # up to the checkpoint
    tries: int = 0


@dataclass(eq=False)
class Check:
    """One sample being checked. `record` gets the state that is computed."""

    sample: _Sample
    name: str
    record: Record
    scheduler: Any
    req: Any = None
    steps_queued: int = 0
    planned: bool = False  # the record belongs to a forward pass, and then to a read
    ended: bool = False  # nobody waits for the result
    difference: Difference | None = None


class Verification:
    """Scheduler thread only, except `_compare`."""

    def __init__(
        self,
        *,
        rate: float,
        store: CheckpointStore,
        layout: StateLayout,
        trust: Trust,
        agreement: Any,
        counters: Counters,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate` is the share of restores to check; with 0 nothing here ever does anything."""
        self.rate = rate
        self.trust = trust
        self._store = store
        self._layout = layout
        self._agreement = agreement
        self._counters = counters
        self._page_size = page_size
        self._clock = clock
        self._pending: deque[_Sample] = deque()
        self._check: Check | None = None
        self._reads: dict[int, Check] = {}  # by the id of the ticket
        self._started = 0
        self._idle_since_s: float | None = None

    def restored(self, req: Any, position: int) -> None:
        """`req` resumes from the SSD's checkpoint at `position`: it may be a sample."""
        tokens = req.full_untruncated_fill_ids
        keys = state_of(req, self._page_size).keys
        key = keys.at(tokens, position)
        if not is_sampled(key, self._counters.restored_requests, self.rate):
            return
        if req.lora_id is not None or req.multimodal_inputs is not None or req.token_type_ids is not None:
            self._skip(Unverified.NOT_ONLY_TOKENS)
        elif position > MAX_TOKENS:
            self._skip(Unverified.TOO_LONG)
        elif len(self._pending) >= MAX_PENDING:
            self._skip(Unverified.NEVER_IDLE)
        else:
            self._pending.append(_Sample(keys.namespace, key, array("q", tokens[:position])))

    def idle(self, scheduler: Any) -> None:
        """The scheduler found nothing to run in this step. Called on every rank in the same step."""
        if self.trust.tree_doubted:
            if scheduler.is_fully_idle() and scheduler.flush_cache():
                self.trust.flushed()
            return
        if self._check is not None:
            self._count_steps(self._check)
            return
        if not self._pending:
            return
        if not scheduler.is_fully_idle():
            self._idle_since_s = None
            return
        if self._idle_since_s is None:
            self._idle_since_s = self._clock()
        (idle_ms,) = self._agreement.minimum([int((self._clock() - self._idle_since_s) * 1000)])
        if idle_ms >= IDLE_S * 1000:
            self._begin(scheduler)

    def owns(self, req: Any) -> bool:
        """Return whether `req` is an internal one."""
        state = getattr(req, "histate", None)
        return state is not None and state.check is not None

    def arrived(self, req: Any) -> bool:
        """`req` enters the queue. Return whether it is an internal one; any other one goes before it."""
        check = self._check
        if check is not None and req.rid == check.name:
            internal_request.mark(req)
            state_of(req, self._page_size).check = check
            check.req = req
            return True
        self._idle_since_s = None
        # The last chunk may be under way already: it ends by itself.
        if check is not None and check.req is not None and not check.planned:
            internal_request.cancel(check.scheduler, check.name)
            if not check.ended:
                self._give_up(check, Unverified.INTERRUPTED, again=True)
        return False

    def gone(self, handle: Any) -> None:
        """The request with this handle was aborted or gives its memory back."""
        check = self._check
        if check is None or check.planned or check.req is None:
            return
        if check.req.cache_request_handle == handle:
            self._give_up(check, Unverified.INTERRUPTED, again=True)

    def rows(self, reqs: list[Any]) -> list[CaptureRow]:
        """Return what the coming forward pass over `reqs` captures for a check."""
        check = self._check
        if check is None or check.req not in reqs or check.planned:
            return []
        req, position = check.req, len(check.sample.tokens)
        if not req.prefix_len < position <= req.extend_end:
            return []
        check.planned = True
        state = state_of(req, self._page_size)
        row = reqs.index(req)
        return [CaptureRow(row, position - req.prefix_len, position, check.sample.key, check.record, state)]

    def captured(self, row: CaptureRow) -> bool:
        """A row has arrived in its record. Return whether it was one of `rows`."""
        check = None if row.state is None else row.state.check
        if check is None:
            return False
        if check.ended:
            self._store.release_record(check.record)
            return True
        ticket = self._store.begin_read(row.key, deliver=partial(self._compare, check))
        if isinstance(ticket, MissReason):
            check.planned = False
            gone = ticket in (MissReason.ABSENT, MissReason.QUARANTINED)
            self._give_up(check, Unverified.RECORD_GONE if gone else Unverified.READ_FAILED)
        else:
            self._reads[id(ticket)] = check
        return True

    def complete(self, ticket: ReadTicket) -> bool:
        """A read was committed on all ranks. Return whether it was one of a check."""
        check = self._reads.pop(id(ticket), None)
        if check is None:
            return False
        if ticket.ok:
            self._store.release(ticket)
        check.planned = False
        if check.ended:
            self._store.release_record(check.record)
        elif not ticket.ok:
            self._give_up(check, Unverified.READ_FAILED)
        else:
            self._judge(check)
        return True

    def reset(self) -> None:
        """The tree is being emptied: nothing that is checked could be served any more."""
        if self._check is not None:
            self._give_up(self._check, Unverified.CACHE_RESET)
        for _ in range(len(self._pending)):
            self._pending.popleft()
            self._skip(Unverified.CACHE_RESET)

    def forget(self, namespace: bytes | None) -> None:
        """Keep no tokens of a tenant that is being purged; None: of nobody. A last chunk that is under way ends."""
        check = self._check
        if check is not None and not check.planned and namespace in (None, check.sample.namespace):
            self._give_up(check, Unverified.PURGED)
            internal_request.cancel(check.scheduler, check.name)
        kept = [sample for sample in self._pending if namespace not in (None, sample.namespace)]
        for _ in range(len(self._pending) - len(kept)):
            self._skip(Unverified.PURGED)
        self._pending = deque(kept)

    @property
    def pending(self) -> int:
        """Samples that wait for an idle server."""
        return len(self._pending)

    def as_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "pending": self.pending,
            "running": self._check is not None,
            **self.trust.as_json(),
        }

    def _begin(self, scheduler: Any) -> None:
        sample = self._pending[0]
        if self._store.lookup(sample.key) is None:
            self._pending.popleft()
            self._skip(Unverified.RECORD_GONE)
            return
        record = self._store.acquire_record()
        if record is None:
            return  # soon
        self._pending.popleft()
        self._started += 1
        check = Check(sample, internal_request.request_name(self._started), record, scheduler)
        self._check = check
        namespace = f"histate-verify-{self._started}-{sample.key.hex()}"
        internal_request.submit(scheduler, check.name, sample.tokens, namespace)
        if check.req is None or len(check.req.origin_input_ids) != len(sample.tokens):
            self._give_up(check, Unverified.NOT_ADMITTED)

    def _count_steps(self, check: Check) -> None:
        """A check that waits for room which never comes would keep the server from being idle."""
        if check.planned:
            return
        check.steps_queued += 1
        if check.steps_queued > MAX_STEPS_QUEUED:
            self._give_up(check, Unverified.NOT_ADMITTED)
            internal_request.cancel(check.scheduler, check.name)

    def _give_up(self, check: Check, reason: Unverified, *, again: bool = False) -> None:
        check.ended = True
        self._check = None
        if not check.planned:
            self._store.release_record(check.record)
        check.sample.tries += 1
        if again and check.sample.tries < MAX_TRIES:
            self._pending.append(check.sample)
        else:
            self._skip(reason)

    def _compare(self, check: Check, record: Record, layers: range) -> None:
        """Reader thread."""
        if layers.stop == len(self._layout.layer_ids):  # the last ones: now all are there
            check.difference = compare(self._layout, record.payload, check.record.payload)

    def _judge(self, check: Check) -> None:
        found = check.difference
        assert found is not None
        check.ended = True
        self._check = None
        self._store.release_record(check.record)
        self._counters.verified += 1
        if self._agreement.minimum([-int(found.is_mismatch)])[0] == 0:
            return
        self._counters.mismatches += 1
        what = f"the checkpoint {check.sample.key.hex()[:16]} at token {len(check.sample.tokens)}"
        if found.is_mismatch:
            self.trust.lose(f"{what} is not what its tokens give: {found}")
        else:
            self.trust.lose(f"{what} is not what its tokens give on another rank")

    def _skip(self, reason: Unverified) -> None:
        self._counters.unverified[reason] += 1
