"""Fault-in: bring one checkpoint from the SSD to the host side of the tree while its request waits in the queue.

Two phases keep it safe. *Lookup* sees the SSD index and may start a read. *Admission* sees only device and host, so the
load-back never waits for a file. A request is skipped by the scheduler (others run) until its read is committed, on
every rank in the same step; then the state is attached, pinned until the request is admitted, and the next match finds
it.

    ready -> _find -> store.begin_read -> (reader thread) deliver -> store.commit -> complete -> attach -> admitted

A request never waits for ever: for a buffer it waits only as long as the reads that were under way, for a read at most
`READ_DEADLINE_S`; while a read is later than that, nothing new is read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

from sglang_histate.adapter.counters import Counters, Miss
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.kv_restore import KvRestore
from sglang_histate.adapter.landing import Landing
from sglang_histate.adapter.pins import HostPins
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.ssd_path import dead_path
from sglang_histate.adapter.tree_attach import Attach, attach_host_state
from sglang_histate.store import CheckpointStore, EntryState, MissReason, ReadTicket, Record

# A host arena that is too small can push an attached state out before its request is admitted. After this many reads
# for one request, recomputing is cheaper than trying again.
MAX_FAULT_INS_PER_REQUEST = 3
# Recomputing 100,000 tokens takes a few seconds on one GPU: a read that takes longer has lost its purpose.
READ_DEADLINE_S = 5.0


@dataclass(eq=False)
class FaultIn:
    """One read in flight. Several requests may wait for it."""

    number: int  # in the order of their start, which is the order of their commits
    key: bytes
    position: int
    started_s: float
    slot: torch.Tensor = field(init=False)
    restore: KvRestore | None = None  # of the KV before `position`, if the SSD has to bring some of it too
    anchor: tuple[Any, Any] | None = None  # node before that KV, and the receipt of its host lock
    state: ReadTicket | None = None
    state_ok: bool | None = None
    waiters: dict[Any, Any] = field(default_factory=dict)  # request handle -> request
    abandoned: bool = False  # past the deadline: its waiters have gone on
    landing: Landing = field(default_factory=Landing)


class _Look(Enum):
    NOTHING = "nothing"
    STARTED = "started"
    SHORT = "short"  # a checkpoint is there, a buffer or a slot is not


class FaultIns:
    """All fault-ins of one rank. Scheduler thread only, except `_deliver`."""

    def __init__(
        self,
        cache: Any,
        store: CheckpointStore,
        slots: HostSlots,
        *,
        kv_face: Any,
        page_size: int,
        min_gain_tokens: int,
        counters: Counters,
    ) -> None:
        self._cache = cache
        self._store = store
        self._slots = slots
        self._kv_face = kv_face
        self._page_size = page_size
        self._min_gain_tokens = min_gain_tokens
        self._counters = counters
        self._by_key: dict[bytes, FaultIn] = {}  # in the order of their start
        self._by_ticket: dict[int, FaultIn] = {}
        self._waiting: dict[Any, FaultIn] = {}
        self._pins = HostPins(cache, slots)
        # States read ahead for a long queue take room from KV: beyond an eighth of the arena, only requests about to run
        # start a read.
        self._early_limit = max(1, slots.total // 8)
        self._started = 0
        self.version = 0  # grows whenever a lookup could find something new

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting(self) -> int:
        """Requests that wait for a read."""
        return len(self._waiting)

    @property
    def pinned(self) -> int:
        """Requests whose attached state is pinned."""
        return len(self._pins)

    def arrived(self, req: Any) -> None:
        """`req` enters the queue: start its read, unless enough of them are ahead of their requests already."""
        if len(self._pins) + len(self._by_key) < self._early_limit:
            self.ready(req)

    def ready(self, req: Any) -> bool:
        """Return True if `req` may be admitted now; False while a checkpoint for it is on its way."""
        if req.cache_request_handle in self._waiting:
            return False
        state = state_of(req, self._page_size)
        if state.looked_at_version == self.version and state.attached is None:
            return True
        # The token ids must determine the state, and a match must not lend a session's KV before its time.
        state.may_ask = not (
            req.input_embeds is not None
            or req.positional_embed_overrides is not None
            or (req.session is not None and req.session.streaming)
        )
        if not state.may_ask:
            return True
        # A prompt shorter than a page is not matched at all: nothing of an earlier match may remain.
        state.kv_covered, state.restorable, state.branch = 0, 0, None
        req.init_next_round_input(self._cache, cow_mamba=False)
        state.looked_at_version = self.version
        look = self._look(req, state)
        if look is _Look.SHORT:
            return not self._waits_for_room(state)
        return look is _Look.NOTHING

    def cancel(self, handle: Any) -> None:
        """The request is gone. A read that nobody waits for any more ends without effect."""
        self._pins.release(handle)
        fault = self._waiting.pop(handle, None)
        if fault is not None:
            fault.waiters.pop(handle, None)
            self._counters.miss(Miss.ABORTED)

    def admitted(self, handle: Any) -> None:
        """The request's load-back holds its own locks now: let its attached state go."""
        self._pins.release(handle)

    def complete(self, ticket: ReadTicket) -> None:
        """A read was committed on all ranks. After a fault-in's last one its waiters go on."""
        fault = self._by_ticket.pop(id(ticket), None)
        if fault is None:
            return  # started before a reset
        if ticket is fault.state:
            fault.state_ok = bool(ticket.ok)
            if ticket.ok:
                self._store.release(ticket)
            elif ticket.miss_reason is not MissReason.CLEARED:
                self._cache.tree_core.ranking.absences.unreadable(fault.key, ticket.miss_reason)
        else:
            assert fault.restore is not None
            fault.restore.complete(ticket)
        self._end_if_done(fault)

    def pump(self) -> None:
        """Go on reading KV where buffers have become free."""
        for fault in [fault for fault in self._by_key.values() if fault.restore is not None]:
            self._pump(fault)
            self._end_if_done(fault)

    def _pump(self, fault: FaultIn) -> None:
        assert fault.restore is not None
        for ticket in fault.restore.pump():
            self._by_ticket[id(ticket)] = fault

    def _end_if_done(self, fault: FaultIn) -> None:
        if fault.state_ok is None or not (fault.restore is None or fault.restore.ended):
            return
        del self._by_key[fault.key]
        self._counters.fault_in_s.add(time.monotonic() - fault.started_s)
        for handle in fault.waiters:
            del self._waiting[handle]
        if fault.abandoned:
            self.version += 1  # the disk is back: what was not looked for meanwhile may be read
        failed = self._end_restore(fault)
        if failed is not None:
            self._slots.free(fault.slot)
            if fault.waiters:  # those that went away have been counted with their own reason
                self._miss(failed, fault)
            self.version += 1  # the entry is gone; the waiters may find an earlier one
            return
        if not fault.waiters:
            self._slots.free(fault.slot)
            return
        self._attach(fault)

    def _end_restore(self, fault: FaultIn) -> Miss | None:
        """Give the tree the KV that was read for `fault`, if all went well, and say what went wrong."""
        restore = fault.restore
        if fault.anchor is not None:
            self._cache.dec_host_lock_ref(*fault.anchor)
        if not fault.state_ok or (restore is not None and restore.failed):
            if restore is not None:
                restore.give_up()
            return Miss.READ_FAILED
        if restore is None:
            return None
        if not restore.attach():
            return Miss.KV_GONE
        self._counters.kv_restores += 1
        self._counters.kv_restored_pages += restore.pages
        for waiter in fault.waiters.values():
            state_of(waiter, self._page_size).kv_restored += restore.pages * self._page_size
        return None

    def expired_until(self) -> int:
        """Return the number of the newest read that is past its deadline on this rank, 0 if none is."""
        now_s = time.monotonic()
        late = (fault.number for fault in self._by_key.values() if now_s - fault.started_s >= READ_DEADLINE_S)
        return max(late, default=0)

    def expire(self, until: int) -> None:
        """Let the waiters of reads up to number `until` go on without them; all ranks call it with the same number.

        Called after `complete`: a read that has ended is never late, however long the scheduler was busy.
        """
        for fault in self._by_key.values():
            if fault.number > until or fault.abandoned:
                continue
            fault.abandoned = True
            self._miss(Miss.DEADLINE, fault)
            for handle in fault.waiters:
                del self._waiting[handle]
            fault.waiters.clear()

    def reset(self) -> None:
        """Forget all reads in flight. Their host slots belong to the pool again, so no thread may write to them."""
        for fault in self._by_key.values():
            fault.landing.cancel()
            if fault.restore is not None:
                fault.restore.cancel()
            self._counters.miss(Miss.CACHE_RESET)
        self._by_key.clear()
        self._by_ticket.clear()
        self._waiting.clear()
        self._pins.clear()
        self.version += 1

    def _look(self, req: Any, state: RequestState) -> _Look:
        """Look `req` up and make it wait for the best checkpoint, if that is worth it and there is room."""
        if any(fault.abandoned for fault in self._by_key.values()):
            state.missed = Miss.DEADLINE
            return _Look.NOTHING
        found = self._find(req, state)
        if found is None:
            return _Look.NOTHING
        position, key, dead = found
        fault = self._by_key.get(key)
        if fault is None:
            if state.fault_ins >= MAX_FAULT_INS_PER_REQUEST:
                self._counters.miss(Miss.RETRIES)
                state.missed = Miss.RETRIES
                state.attached = None  # do not look again before something new is stored
                return _Look.NOTHING
            fault = self._begin(position, key, state, dead)
            if fault is None:
                return _Look.SHORT
        if state.fault_ins == 0:
            self._counters.internal_hits += 1
        state.fault_ins += 1
        state.short_since = None
        fault.waiters[req.cache_request_handle] = req
        self._waiting[req.cache_request_handle] = fault
        return _Look.STARTED

    def _waits_for_room(self, state: RequestState) -> bool:
        """Return True while reads that were under way when the request came short have not ended.

        A request waits so once. If others take what became free, it goes on without.
        """
        if state.gave_up_on_room:
            return False
        if state.short_since is None:
            state.short_since = self._started
        oldest = next(iter(self._by_key.values()), None)
        if oldest is None or oldest.number > state.short_since:
            self._counters.miss(Miss.NO_ROOM)
            state.missed = Miss.NO_ROOM
            state.gave_up_on_room = True
            return False
        state.looked_at_version = -1
        return True

    def _find(self, req: Any, state: RequestState) -> tuple[int, bytes, list[Any]] | None:
        """Return the deepest stored checkpoint that KV of any tier reaches and that saves enough tokens.

        With it the dead nodes after the request's resident KV whose KV the SSD has, as far as they match.
        """
        tokens = req.full_untruncated_fill_ids
        dead, reach = dead_path(self._cache, req, state, self._page_size)
        position = min(reach, len(tokens) - 1) // self._page_size * self._page_size
        lowest = max(state.restorable + self._min_gain_tokens, self._page_size)
        while position >= lowest:
            key = state.keys.at(tokens, position)
            if self._store.lookup(key) is not None:
                return position, key, dead
            position -= self._page_size
        return None

    def _begin(self, position: int, key: bytes, state: RequestState, dead: list[Any]) -> FaultIn | None:
        entry = self._store.lookup(key)
        assert entry is not None
        if entry.state is EntryState.LIVE and self._store.records.free == 0:
            return None  # before room is taken, which may push something else out
        fault = FaultIn(self._started + 1, key, position, time.monotonic())
        if position > state.kv_covered and not self._begin_restore(fault, state.kv_covered, dead):
            return None
        slot = self._slots.alloc()
        ticket = None
        if slot is not None:
            fault.slot = slot
            ticket = self._store.begin_read(key, deliver=partial(self._deliver, fault))
        if slot is None or ticket is None or isinstance(ticket, MissReason):
            if slot is not None:
                self._slots.free(slot)
            self._end_restore(fault)
            return None
        self._started += 1
        fault.state = ticket
        self._by_key[key] = fault
        self._by_ticket[id(ticket)] = fault
        if fault.restore is not None:
            self._pump(fault)
        self._counters.fault_ins += 1
        return fault

    def _begin_restore(self, fault: FaultIn, first: int, dead: list[Any]) -> bool:
        """Take room for the KV from `first` up to the checkpoint and lock what it continues. False: no room."""
        core, anchor, end = self._cache.tree_core, dead[0].parent, first
        for node in dead:
            if end + len(node.key) >= fault.position:
                break
            end += len(node.key)
        if end + len(node.key) > fault.position:
            node, actions = core.cut(node, fault.position - end)
            self._cache._apply_cache_actions(actions)
        if anchor.parent is not None:
            if not anchor.backuped:
                # Host KV below KV that is only on the device would break an invariant of the tree.
                self._cache._execute_and_commit_kv_backup(core.build_backup_kv_action(anchor.id))
                if not anchor.backuped:
                    return False
            fault.anchor = anchor.id, self._cache.inc_host_lock_ref(anchor.id).to_dec_params()
        indices = self._kv_face.alloc(fault.position - first)
        if indices is None:
            if fault.anchor is not None:
                self._cache.dec_host_lock_ref(*fault.anchor)
                fault.anchor = None
            return False
        fault.restore = KvRestore(
            self._cache, self._store, self._kv_face, node.id, first, fault.position, indices
        )
        return True

    def _deliver(self, fault: FaultIn, record: Record, layers: range) -> None:
        """Reader thread: copy verified bytes into the host slot, so that the scheduler thread never does."""
        fault.landing.copy(lambda: self._slots.fill(fault.slot, record.payload, layers))

    def _miss(self, reason: Miss, fault: FaultIn) -> None:
        """Count what became of a read, and tell those that waited for it."""
        self._counters.miss(reason)
        for waiter in fault.waiters.values():
            state_of(waiter, self._page_size).missed = reason

    def _attach(self, fault: FaultIn) -> None:
        req = next(iter(fault.waiters.values()))
        key = state_of(req, self._page_size).keys.radix_key(req.full_untruncated_fill_ids, fault.position)
        outcome, node_id = attach_host_state(self._cache, key, fault.slot)
        if outcome is Attach.ATTACHED:
            for handle, waiter in fault.waiters.items():
                state = state_of(waiter, self._page_size)
                state.attached, state.missed = fault.position, None
                self._pins.hold(handle, node_id)
            return
        self._slots.free(fault.slot)
        if outcome is Attach.NO_HOST_KV:
            self._miss(Miss.NO_HOST_KV, fault)  # reading it again would end here again
            return
        for waiter in fault.waiters.values():
            state_of(waiter, self._page_size).looked_at_version = -1  # the tree has changed
        if outcome is Attach.KV_GONE:
            self._miss(Miss.KV_GONE, fault)
            self.version += 1  # an earlier checkpoint may still be in reach
