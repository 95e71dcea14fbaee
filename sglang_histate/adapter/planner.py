"""Decides, for each prefill batch, which checkpoints its forward pass captures.

The interval is chosen once per request over its whole remaining prompt; each chunk then takes the positions that fall
into it. The bytes that a plan may hold in flight are bounded here, by acquiring the records before the forward pass:
what does not fit is dropped and counted, so that nothing later ever waits for memory. What no tier would take is not
captured either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sglang_histate.adapter.attribution import Absences
from sglang_histate.adapter.capture import CaptureRow, ForwardCapture
from sglang_histate.adapter.counters import Counters, Drop, Why
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.hinted import HintedSessions
from sglang_histate.adapter.history import Claimed, HistoryTier
from sglang_histate.adapter.prompt_places import PromptPlaces
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.policy.capture_plan import plan_positions, positions_in_chunk
from sglang_histate.policy.capture_value import cost_tokens
from sglang_histate.policy.hit_prior import HitPrior
from sglang_histate.policy.interval import IntervalPolicy
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.scarcity import price_of_a_hit
from sglang_histate.policy.segment_plan import plan_segment
from sglang_histate.store import CheckpointStore, PutResult, Record


class Prices(Protocol):
    """What `Ranking` tells about the traffic so far."""

    def pressure(self) -> float:
        """T_KV / T_state."""

    def end_share(self) -> float:
        """q, the share of hits at the end of a trajectory."""

    def checkpoint_price(self) -> float:
        """Tokens that a checkpoint on the SSD has to save."""

    def hits_inside(self, start: int, end: int) -> float:
        """Requests to come that are expected to hit inside a segment."""

    def parted(self, node: Any, position: int) -> int | None:
        """Where the text went on to that a request left at the end of a node."""


class _Wanted(NamedTuple):
    """A position that is not stored. `before`: the last one that is; `after`: the next one planned."""

    batch_row: int
    req: Any
    state: RequestState
    position: int
    before: int
    after: int | None

    @property
    def is_end(self) -> bool:
        """Whether it is the last one of its prompt, which is in the plan whatever the interval."""
        return self.position == self.state.plan[-1]

    @property
    def key(self) -> bytes:
        return self.state.keys.at(self.req.full_untruncated_fill_ids, self.position)


class CapturePlanner:
    """Plans captures of one rank. Every rank sees the same batches and the same store, so all plan alike."""

    def __init__(
        self,
        *,
        interval: IntervalPolicy,
        state_tokens: float,
        ranking: Prices,
        page_size: int,
        grid: int,
        layout: StateLayout,
        store: CheckpointStore,
        egress: LayerEgress,
        counters: Counters,
        absences: Absences,
        places: PromptPlaces | None = None,
        hinted: HintedSessions | None = None,
        history: HistoryTier | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`state_tokens` is N_s, one checkpoint in tokens of KV; `grid` is lcm(64, page size) in tokens.

        `places`: where messages begin, for an interval that is learned; None where no chat template tells. `history` chooses
        the tier; None: everything goes to the SSD.
        """
        self._interval = interval
        self._state_tokens = state_tokens
        self._ranking = ranking
        self.prior = HitPrior() if journal is None else journal.hit_prior()
        self.places = places
        self._hinted = hinted
        self._history = history
        self._page_size = page_size
        self._grid = grid
        self._layout = layout
        self._store = store
        self._egress = egress
        self._counters = counters
        self._absences = absences
        self._journal = journal
        if journal is not None:
            journal.choices(interval)

    def hits_expected(self) -> dict[str, Any] | None:
        """Return what is known about where requests part, for the status; None unless positions follow it."""
        if not self._interval.learned:
            return None
        return self.prior.as_json() | {"places": None if self.places is None else self.places.as_json()}

    def plan_batch(self, reqs: list[Any], more: Sequence[CaptureRow] = ()) -> ForwardCapture | None:
        """Return the capture for a batch that is about to extend, or None if there is nothing to take.

        `more` are rows that somebody else wants from the same forward pass.
        """
        wanted: list[_Wanted] = []
        for batch_row, req in enumerate(reqs):
            wanted += self._positions(batch_row, req, state_of(req, self._page_size))
        if not wanted and not more:
            return None
        rows: list[CaptureRow] = []
        for one in self._fit(wanted):
            last = rows[-1].position if rows and rows[-1].batch_row == one.batch_row else 0
            claimed = self._claim(one, max(one.before, last))
            if isinstance(claimed, Claimed):
                record, tier, why = claimed
                place = one.batch_row, one.position - one.req.prefix_len, one.position
                rows.append(CaptureRow(*place, one.key, record, one.state, tier, why))
                one.state.kept = max(one.state.kept, one.position)
            else:
                self._absences.refused(one.key, claimed)
                refused = Drop.REFUSED if self._history is None else Drop.HOST_PRICE
                in_use = claimed in (PutResult.NO_BUFFER, PutResult.CLOSED)
                self._counters.drop(Drop.NO_RECORD if in_use else refused)
        self._counters.planned += len(rows)
        rows += more
        return ForwardCapture(rows, self._layout, self._egress) if rows else None

    def _claim(self, one: _Wanted, before: int) -> Claimed | PutResult:
        """Return a record for a position, or why the SSD does not want it. `before`: the checkpoint kept before it."""
        total = len(one.req.full_untruncated_fill_ids)
        cost = cost_tokens(one.position, before, one.after, total, self._ranking.end_share())
        if self._history is not None:
            return self._history.claim(one.key, cost, is_end=one.is_end)
        found = self._store.claim_record(one.key, cost / self._layout.stored_bytes)
        return Claimed(found) if isinstance(found, Record) else found

    def prices(self) -> dict[str, Any]:
        """Return the tokens that a checkpoint has to save, for the status; by tier too where the tier is chosen by them."""
        found: dict[str, Any] = {"capture_price_tokens": self._price()}
        if self._history is not None:
            host, ssd = self._history.prices()
            found["history_price_tokens"] = {"host": host, "ssd": ssd}
        return found

    def _price(self) -> float:
        """Return the tokens that a checkpoint has to save to be worth its place."""
        return self._ranking.checkpoint_price() if self._history is None else self._history.price()

    def _positions(self, batch_row: int, req: Any, state: RequestState) -> list[_Wanted]:
        """Return the positions inside the request's next chunk that are not stored yet."""
        start, end = req.prefix_len, req.extend_end
        if state.check is not None:
            return []  # nobody will send this prompt
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            return []  # the token ids do not determine the state
        state.released = False
        if start % self._grid:
            # An off-grid start can neither be named by the tree nor be reached by every kernel's states.
            # A plan goes on behind this chunk; without one, the next chunk on the grid makes it.
            planned = state.plan_next == start
            lost = [p for p in state.plan if start < p <= end] if planned else []
            self._off_grid(req, state, lost)
            self._counters.drop(Drop.MISALIGNED, len(lost) if planned else 1)
            state.plan_next = end if planned else -1
            return []
        if state.plan_next != start:
            self._plan_request(req, state, start)
        state.plan_next = end
        plan = state.plan
        if self._interval.at_steps and end % self._grid == 0 and end not in plan:
            plan = tuple(sorted((*plan, end)))
            state.plan = plan
        chunk = positions_in_chunk(plan, start, end)
        self._off_grid(req, state, chunk.misaligned)
        self._counters.drop(Drop.MISALIGNED, len(chunk.misaligned))
        fresh, before = [], min(state.kept, start)
        for position in chunk.capture:
            after = next(iter(plan[bisect_right(plan, position) :]), None)
            one = _Wanted(batch_row, req, state, position, before, after)
            on_host = self._history is not None and self._history.on_host(one.key)
            if self._store.lookup(one.key) is None and not on_host:
                fresh.append(one)
            else:
                self._store.touch(one.key)
                self._counters.already_stored += 1
                before = position
        state.kept = before
        return fresh

    def _off_grid(self, req: Any, state: RequestState, positions: Sequence[int]) -> None:
        for position in positions:
            if position % self._page_size == 0:
                key = state.keys.at(req.full_untruncated_fill_ids, position)
                self._absences.note(key, Why.OFF_GRID)

    def _plan_request(self, req: Any, state: RequestState, start: int) -> None:
        total = len(req.full_untruncated_fill_ids)
        # The last grid position of the prompt is the final checkpoint, whatever the interval. The same prompt sent again
        # is computed from one token before its end at the latest, so a prompt that ends on the grid needs one before.
        final, resend = total // self._grid * self._grid, (total - 1) // self._grid * self._grid
        # A place where two prompts were seen to part is likely to be one again.
        extras = [final, resend, state.branch]
        if self._hinted is not None:
            extras += [at // self._grid * self._grid for at in self._hinted.positions(req)]
        given = {
            at for at in extras if at is not None and start < at <= total and (at - start) % self._grid == 0
        }
        positions: Sequence[int]
        if self._interval.learned:
            positions = self._learned(req, state, start, total, sorted(given))
        else:
            positions = self._spaced(start, total)
        state.plan, state.kept = tuple(sorted(given.union(positions))), start

    def _spaced(self, start: int, total: int) -> tuple[int, ...]:
        """Return the positions of the interval that is chosen for the segment."""
        if self._interval.scarce:
            inside = self._ranking.hits_inside(start, total)
            cost, pressure = price_of_a_hit(self._price(), inside), 1.0
        else:
            cost, pressure = self._state_tokens, self._ranking.pressure()
        interval = self._interval.choose(total - start, cost, pressure)
        if self._journal is not None:
            self._journal.interval(total - start, cost, pressure, interval)
        self._counters.intervals[interval] = self._counters.intervals.get(interval, 0) + 1
        return plan_positions(start, total, interval, self._grid)

    def _learned(self, req: Any, state: RequestState, start: int, total: int, given: list[int]) -> list[int]:
        """Return the positions where hits are expected to save more than a checkpoint costs."""
        grid = self._grid
        first, end = start // grid, total // grid
        places = self.places
        found = [] if places is None else places.of(req, start)
        if not state.learned_from:
            state.learned_from = True
            self._learn(req, state, first, end)
            if places is not None:
                places.remember(req, state, found)
        expected = [] if places is None else [(page, places.expected(kind)) for page, kind in found]
        price = self._price() / grid
        kept = [at // grid for at in given]
        chosen = plan_segment(self.prior, first, end, price, kept, expected)
        if self._journal is not None:
            self._journal.plan(first, end, price, kept, found, chosen)
        return [page * grid for page in chosen]

    def _learn(self, req: Any, state: RequestState, first: int, end: int) -> None:
        """Count a request of the pages from `first` to `end`, and where it left an earlier text."""
        self.prior.segment(first, end)
        at = state.kv_covered
        went_on = self._ranking.parted(state.last_visited, at)
        if went_on is None or at % self._grid or at > len(req.full_untruncated_fill_ids):
            return
        # A place that is known by what begins there is counted once, not by its depth too.
        if self.places is None or not self.places.parted(req, state, at):
            self.prior.parted(at // self._grid, went_on // self._grid)

    def _fit(self, wanted: list[_Wanted]) -> list[_Wanted]:
        """Cut the batch's captures to the free records: each request's last one first, the others evenly spread."""
        free = self._store.records.free_for_writes
        if len(wanted) <= free:
            return wanted
        self._counters.drop(Drop.NO_RECORD, len(wanted) - free)
        last = {row: index for index, (row, *_) in enumerate(wanted)}
        kept = sorted(last.values())[:free]
        others = [index for index in range(len(wanted)) if index not in set(kept)]
        room = free - len(kept)
        kept += [others[(2 * i + 1) * len(others) // (2 * room)] for i in range(room)]
        for index in set(range(len(wanted))).difference(kept):
            self._absences.note(wanted[index].key, Why.NO_BUFFER)
        return [wanted[index] for index in sorted(kept)]
