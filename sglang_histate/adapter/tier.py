"""The SSD tier of one rank as the radix cache sees it: capture plans in, fault-ins out, one `tick` per scheduler step.

`tick` is where everything asynchronous becomes visible: finished captures are published, finished writes and reads are
committed. The ranks first agree on how much of it has finished everywhere, then all do the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_histate.adapter.accounting import Accounting
from sglang_histate.adapter.agreed_time import AgreedTime
from sglang_histate.adapter.capture import CaptureRow, ForwardCapture
from sglang_histate.adapter.counters import Counters, Drop, Why
from sglang_histate.adapter.fault_in import FaultIns
from sglang_histate.adapter.final_states import FinalStates
from sglang_histate.adapter.hinted import HintedSessions
from sglang_histate.adapter.host_history import HostHistory
from sglang_histate.adapter.kv_spill import KvSpill
from sglang_histate.adapter.output_ends import OutputEnds
from sglang_histate.adapter.planner import CapturePlanner
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.ranks import RankAgreement, finished_count
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.verification import Verification
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.store import CheckpointStore, DropReason, EntryState, PutResult

logger = logging.getLogger(__name__)

TIME_STEPS = 16
"""Steps with nothing under way after which the ranks agree on the time, as long as write limits wait for it."""

SNAPSHOT_S = 60.0
"""How often the order of use and the bytes written today are written down: what a crash may lose of them."""


class SsdTier:
    """Owns the store and everything on its way to or from it. Scheduler thread only."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        planner: CapturePlanner,
        accounting: Accounting,
        fault_ins: FaultIns,
        output_ends: OutputEnds,
        kv_spill: KvSpill,
        final_states: FinalStates,
        history: HostHistory,
        verification: Verification,
        hinted: HintedSessions,
        agreement: RankAgreement,
        counters: Counters,
        cache: Any,
        page_size: int,
    ) -> None:
        self.store = store
        self.core = cache.tree_core
        self.ranking: Ranking = cache.tree_core.ranking
        self.fault_ins = fault_ins
        self.output_ends = output_ends
        self.kv_spill = kv_spill
        self.final_states = final_states
        self.history = history
        self.verification = verification
        self._hinted = hinted
        self.counters = counters
        self._planner = planner
        self.accounting = accounting
        self._agreement = agreement
        self._page_size = page_size
        self._captures: deque[ForwardCapture] = deque()
        self._deaths_seen = 0
        self._time = AgreedTime()
        self._quiet_steps = 0
        self.agree = True  # whether all ranks had evicted the same at the last agreement
        self._snapshot_s = 0.0  # when the last one was taken

    def plan_batch(self, reqs: list[Any]) -> ForwardCapture | None:
        """Account for what the batch resumes from, and plan what its forward pass captures."""
        for req in reqs:
            if self.verification.trust.tree_doubted:
                req.skip_radix_cache_insert = True  # an insert would hand it the KV that lies there
            if not self.verification.owns(req):
                self.request_planned(req)
        capture = self._planner.plan_batch(reqs, self.verification.rows(reqs))
        if capture is not None:
            self._captures.append(capture)
            self.counters.forwards += 1
        return capture

    def hits_expected(self) -> dict[str, Any] | None:
        """Return what the capture plan knows about where requests part, for the status."""
        return self._planner.hits_expected()

    def prices(self) -> dict[str, Any]:
        """Return what a checkpoint has to save to be captured, for the status."""
        return self._planner.prices()

    def published(self, req: Any) -> None:
        """The tree has the request's tokens up to `req.last_node`: they are in use now, and its checkpoints have a place."""
        node, end = self.core.node_by_id(req.last_node), req.kv.cache_protected_len
        if node.parent is None:
            return
        state = state_of(req, self._page_size)
        self.ranking.used(node)
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            return  # the token ids do not determine the state, so it has no key
        positions = [p for p in state.plan if state.placed < p <= end]
        if end > state.placed and end not in positions:
            positions.append(end)  # an output's end, or where stock left a state
        self._name(req, node, end)
        start = end - len(node.key)
        for position in reversed(positions):
            while position <= start:
                node = node.parent
                start -= len(node.key)
            key = state.keys.at(req.full_untruncated_fill_ids, position)
            self.ranking.placed(key, node, position - start, self.store.lookup(key) is not None)
        state.placed = max(state.placed, end)

    def finished(self, req: Any) -> None:
        """`req` has its whole answer, and the tree has its tokens: keep the answer's end, unless nobody comes back to it."""
        if isinstance(req.finished_reason, FINISH_ABORT):
            self.output_ends.take(
                req
            )  # its client may come back with the same prompt, whatever it said before
            return
        if not self._hinted.is_over(req):
            self.output_ends.take(req)
        self._hinted.finished(req)

    def _name(self, req: Any, node: Any, end: int) -> None:
        """Tell the ranking the page hashes of the nodes up to `node`, which ends at `end`, that it does not know yet."""
        names, keys = self.ranking.ssd.names, state_of(req, self._page_size).keys
        while node.parent is not None and node.id not in names:
            start = end - len(node.key)
            names.set(node.id, keys.between(req.full_untruncated_fill_ids, start, end))
            self.ranking.ssd.adopt(node.id)
            node, end = node.parent, start

    def tick(self) -> None:
        """Make visible what has finished on all ranks. Never waits."""
        self.bury()
        self.kv_spill.plan()
        if self.core.deaths != self._deaths_seen:
            # KV that a waiting request found on the host may be on the SSD only by now: it has to look again.
            self._deaths_seen = self.core.deaths
            self.fault_ins.version += 1
        if not (
            self._captures
            or self.output_ends
            or self.store.outstanding
            or self.kv_spill
            or self.fault_ins
            or self.history
        ):
            # Only the time could change something, and a step in which nothing else happens should not cost a message.
            self._quiet_steps += self.store.admission.waits_for_time or self.store.restless
            if self._quiet_steps < TIME_STEPS:
                return
        self._quiet_steps = 0
        if len(self.fault_ins):
            # A scheduler that spins while a request waits would keep the reader threads from the GIL.
            time.sleep(0)
        writes, reads = self.store.completed()
        # A rank whose disk hangs lets all ranks go on: the largest number, as the minimum of negative ones.
        mine = [
            finished_count(self._captures, lambda capture: capture.done()),
            self.output_ends.done_count(),
            writes,
            reads,
            self.kv_spill.done_count(),
            -self.fault_ins.expired_until(),
            self.ranking.digest,
            -self.ranking.digest,
            *self._time.mine(),
        ]
        captures, ends, writes, reads, spills, expired, low, high, *now = self._agreement.minimum(mine)
        self.agree = low == -high
        self._now(AgreedTime.seconds(now))
        ended = self.output_ends.pop(ends)
        for end in ended:
            if end.record is None:
                self.final_states.take(end)  # from the record that is being written, while it is there
        self._commit(writes, reads)
        # After the commits: a new write need not wait for those that have ended.
        for _ in range(captures):
            self._take_capture()
        for end in ended:
            if end.record is not None:
                if not end.refused:
                    self._publish(end)
                self.final_states.take(end)
        for row in self.history.step():
            self._publish(row)
        self.kv_spill.finish(spills)
        self.fault_ins.pump()
        self.fault_ins.expire(-expired)

    def _take_capture(self) -> None:
        """The states of the oldest forward pass have arrived: hand them to who wanted them."""
        for row in self._captures.popleft().rows:
            if self.verification.captured(row):
                continue
            if row.tier is Tier.HOST:
                self.history.take(row)
            else:
                self._publish(row)
            self.counters.captured += 1

    def _now(self, now_s: float) -> None:
        self.store.tick(now_s)
        if now_s - self._snapshot_s >= SNAPSHOT_S:
            self._snapshot_s = now_s
            self.store.snapshot()

    def _commit(self, writes: int, reads: int) -> None:
        """Commit the writes and reads up to these numbers, which have ended on all ranks."""
        write_ok, read_ok = self.store.outcomes(writes, reads)
        if write_ok or read_ok:
            flags = self._agreement.minimum([int(ok) for ok in (*write_ok, *read_ok)])
            cut = len(write_ok)
            committed = self.store.commit([bool(ok) for ok in flags[:cut]], [bool(ok) for ok in flags[cut:]])
            for ticket in committed.reads:
                others = self.final_states, self.history, self.verification
                if not any(other.complete(ticket) for other in others):
                    self.fault_ins.complete(ticket)

    def bury(self) -> None:
        """Take out of the tree what neither device nor host has, nor the SSD any more."""
        lost = self.ranking.ssd.incomplete
        while lost:
            node_id = lost.pop()
            if node_id in self.ranking.tree and not self.ranking.ssd.has_kv(node_id):
                node = self.core.node_by_id(node_id)
                if self.core.is_dead(node):
                    self.core.remove_dead(node)

    def on_all_ranks(self, values: list[int]) -> list[int]:
        """Return the smallest of each over the ranks. Every rank must call it in the same step."""
        return self._agreement.minimum(values)

    def ranks_agree(self) -> bool:
        """Return whether all ranks have evicted the same so far. Every rank must call it in the same step."""
        lowest, highest = self._agreement.minimum([self.ranking.digest, -self.ranking.digest])
        return lowest == -highest

    def request_planned(self, req: Any) -> None:
        """The request is in a batch: what it resumes from is locked by its load-back."""
        self.fault_ins.admitted(req.cache_request_handle)
        self._account(req)

    def reset(self) -> None:
        """Empty the tier (`/flush_cache`). The server is idle, so no forward pass is under way."""
        for capture in self._captures:
            capture.drain()
            self._discard(capture)
        self._captures.clear()
        self.output_ends.reset()
        self.kv_spill.reset()
        self.final_states.reset()
        self.history.reset()
        self.fault_ins.reset()
        self.verification.reset()
        self._hinted.reset()
        self.store.clear()

    def _discard(self, capture: ForwardCapture) -> None:
        for row in capture.rows:
            self.counters.drop(Drop.CACHE_RESET)
            self.store.release_record(row.record)

    def land(self) -> None:
        """Take in what is under way between device, host and store, without asking the other ranks. For the end only."""
        self.store.admission.only_daily()
        self.verification.reset()
        while self._captures:
            self._captures[0].drain()
            if self._captures[0].done():
                self._take_capture()
            else:
                # Its forward pass never ran: what lies there is not its state.
                self._discard(self._captures.popleft())
        self.history.forget(None)
        self.output_ends.drain()
        for end in self.output_ends.pop(len(self.output_ends)):
            if end.record is not None:
                self._publish(end)
        self.kv_spill.finish(len(self.kv_spill))

    def close(self) -> None:
        self.kv_spill.close()
        self.store.close()

    def released(self, req: Any) -> None:
        """The request gives back its KV that is not in the tree: it was aborted, or is to be computed again later.

        Checkpoints in the tree stay: the prompt may be sent again, and resumes there. Those beyond cannot be used until
        their KV is computed again, and then they are captured again: what waits to be written is not. What is written
        already stays; without a place in the tree it is the first to go.
        """
        state = state_of(req, self._page_size)
        state.released = True
        self.verification.gone(req.cache_request_handle)
        for key in [state.keys.known(position) for position in state.plan if position > state.placed]:
            entry = None if key is None else self.store.lookup(key)
            if (
                entry is not None
                and entry.state is EntryState.WRITING
                and not self.ranking.has_place(entry.key)
            ):
                self.store.drop(entry.key, DropReason.ABORTED)

    def _publish(self, item: CaptureRow | Any) -> None:
        if isinstance(item, CaptureRow) and item.useless:
            self.counters.drop(Drop.ABORTED)
            self.ranking.absences.note(item.key, Why.ABORTED)
            self.store.release_record(item.record)
            return
        result = self.store.put(item.key, item.position, item.record, namespace=item.namespace)
        if result is PutResult.STORED:
            self.fault_ins.version += 1
            if isinstance(item, CaptureRow):
                self.counters.historical[Tier.SSD, item.reason] += 1
        else:
            self.ranking.absences.refused(item.key, result)

    def _account(self, req: Any) -> None:
        """Count, once per request, how much of its prefix was resumed through an SSD checkpoint."""
        state = state_of(req, self._page_size)
        if state.accounted:
            return
        state.accounted = True
        resumed = self.core.node_by_id(req.last_node) if req.prefix_len else self.core.root_node
        self.ranking.admitted(resumed)
        self._hinted.admitted(req)
        if self.accounting.admitted(req):
            self.verification.restored(req, req.prefix_len)
