"""Fault-in: bring one checkpoint from the SSD to the host side of the tree while its request waits in the queue.

Two phases keep it safe. *Lookup* sees the SSD index and may start a read. *Admission* sees only device and host, so the
load-back never waits for a file. A request is skipped by the scheduler (others run) until its read is committed, on
every rank in the same step; then the state is attached and the next match finds it.

    arrived / ready -> _find -> store.begin_read -> (reader thread) deliver -> store.commit -> complete -> attach
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_histate.adapter.counters import Counters, Miss
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.tree_attach import Attach, attach_host_state
from sglang_histate.store import CheckpointStore, MissReason, ReadTicket, Record

# A host pool that is too small can push an attached state out before its request is admitted. After this many reads
# for one request, recomputing is cheaper than trying again.
MAX_FAULT_INS_PER_REQUEST = 3


@dataclass(eq=False)
class FaultIn:
    """One read in flight. Several requests may wait for it."""

    key: bytes
    position: int
    slot: torch.Tensor
    ticket: ReadTicket | None = None
    waiters: dict[Any, Any] = field(default_factory=dict)  # request handle -> request
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FaultIns:
    """All fault-ins of one rank. Scheduler thread only, except `_deliver`."""

    def __init__(
        self,
        cache: Any,
        store: CheckpointStore,
        slots: HostSlots,
        *,
        page_size: int,
        min_gain_tokens: int,
        counters: Counters,
    ) -> None:
        self._cache = cache
        self._store = store
        self._slots = slots
        self._page_size = page_size
        self._min_gain_tokens = min_gain_tokens
        self._counters = counters
        self._by_key: dict[bytes, FaultIn] = {}
        self._by_ticket: dict[int, FaultIn] = {}
        self._waiting: dict[Any, FaultIn] = {}
        self.version = 0  # grows whenever a lookup could find something new

    def __len__(self) -> int:
        return len(self._by_key)

    def ready(self, req: Any) -> bool:
        """Return True if `req` may be admitted now; False while a checkpoint for it is being read."""
        if req.cache_request_handle in self._waiting:
            return False
        state = state_of(req, self._page_size)
        if state.looked_at_version == self.version and state.attached is None:
            return True
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            return True
        req.init_next_round_input(self._cache, cow_mamba=False)
        return not self._start(req, state)

    def cancel(self, handle: Any) -> None:
        """The request is gone. A read that nobody waits for any more ends without effect."""
        fault = self._waiting.pop(handle, None)
        if fault is not None:
            fault.waiters.pop(handle, None)
            self._counters.miss(Miss.ABORTED)

    def complete(self, ticket: ReadTicket) -> None:
        """A read was committed on all ranks: attach its state, or forget it, and let the waiters go."""
        fault = self._by_ticket.pop(id(ticket), None)
        if fault is None:
            return  # started before a reset
        del self._by_key[fault.key]
        for handle in fault.waiters:
            del self._waiting[handle]
        if not ticket.ok:
            self._slots.free(fault.slot)
            self._counters.miss(Miss.READ_FAILED)
            self.version += 1  # the entry is gone; the waiters may find an earlier one
            return
        self._store.release(ticket)
        if not fault.waiters:
            self._slots.free(fault.slot)
            return
        self._attach(fault)

    def reset(self) -> None:
        """Forget all reads in flight. Their host slots belong to the pool again, so no thread may write to them."""
        for fault in self._by_key.values():
            with fault.lock:
                fault.cancelled = True
            self._counters.miss(Miss.CACHE_RESET)
        self._by_key.clear()
        self._by_ticket.clear()
        self._waiting.clear()
        self.version += 1

    def _start(self, req: Any, state: RequestState) -> bool:
        """Look `req` up and wait for the best checkpoint. Returns True if the request waits now."""
        state.looked_at_version = self.version
        found = self._find(req, state)
        if found is None:
            return False
        position, key = found
        fault = self._by_key.get(key)
        if fault is None:
            if state.fault_ins >= MAX_FAULT_INS_PER_REQUEST:
                self._counters.miss(Miss.RETRIES)
                state.attached = None  # do not look again before something new is stored
                return False
            fault = self._begin(position, key)
            if fault is None:
                return False
        if state.fault_ins == 0:
            self._counters.internal_hits += 1
        state.fault_ins += 1
        fault.waiters[req.cache_request_handle] = req
        self._waiting[req.cache_request_handle] = fault
        return True

    def _find(self, req: Any, state: RequestState) -> tuple[int, bytes] | None:
        """Return the deepest stored checkpoint that the request's resident KV reaches and that saves enough tokens."""
        tokens = req.full_untruncated_fill_ids
        position = min(state.kv_covered, len(tokens) - 1) // self._page_size * self._page_size
        lowest = max(state.restorable + self._min_gain_tokens, self._page_size)
        while position >= lowest:
            key = state.keys.at(tokens, position)
            if self._store.lookup(key) is not None:
                return position, key
            position -= self._page_size
        return None

    def _begin(self, position: int, key: bytes) -> FaultIn | None:
        slot = self._slots.alloc()
        if slot is None:
            self._counters.miss(Miss.NO_HOST_SLOT)
            return None
        fault = FaultIn(key, position, slot)
        ticket = self._store.begin_read(key, deliver=lambda record: self._deliver(fault, record))
        if isinstance(ticket, MissReason):
            self._slots.free(slot)
            self._counters.miss(Miss.NO_BUFFER)
            return None
        fault.ticket = ticket
        self._by_key[key] = fault
        self._by_ticket[id(ticket)] = fault
        self._counters.fault_ins += 1
        return fault

    def _deliver(self, fault: FaultIn, record: Record) -> None:
        """Reader thread: copy verified bytes into the host slot, so that the scheduler thread never does."""
        with fault.lock:
            if not fault.cancelled:
                self._slots.fill(fault.slot, record.payload)

    def _attach(self, fault: FaultIn) -> None:
        req = next(iter(fault.waiters.values()))
        key = state_of(req, self._page_size).keys.radix_key(req.full_untruncated_fill_ids, fault.position)
        outcome = attach_host_state(self._cache, key, fault.slot)
        if outcome is not Attach.ATTACHED:
            self._slots.free(fault.slot)
        if outcome is Attach.KV_GONE:
            self._counters.miss(Miss.KV_GONE)
            self.version += 1
            return
        for waiter in fault.waiters.values():
            state_of(waiter, self._page_size).attached = fault.position
