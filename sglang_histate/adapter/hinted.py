"""What becomes of clients' hints: positions for the capture plan, and how sessions are ranked.

All ranks get the same requests, so all do the same.
"""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.counters import Counters
from sglang_histate.adapter.hints import Hints, Ignored, parse
from sglang_histate.adapter.kept_sessions import KeptSessions
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.token_spans import MOST_MARKERS, prompt_spans
from sglang_histate.policy.retention import FORK_REQUESTS, SLEEP_REQUESTS, Forks
from sglang_histate.policy.session_ends import End, SessionEnds
from sglang_histate.policy.structure import Structure, head_end, message_starts

Name = tuple[bytes, str]
"""A session, as its tenant calls it."""


class HintedSessions:
    """Scheduler thread only. `structure`: None where no chat template tells where messages begin."""

    def __init__(
        self,
        core: Any,
        ranking: Ranking,
        kept: KeptSessions,
        counters: Counters,
        *,
        structure: Structure | None,
        page_size: int,
        grid: int,
    ) -> None:
        """`grid`: tokens, checkpoints lie on multiples of it."""
        self._core = core
        self._ranking = ranking
        self._kept = kept
        self._counters = counters
        self._structure = structure
        self._page_size = page_size
        self._grid = grid
        self._ends = SessionEnds()

    def admitted(self, req: Any) -> None:
        """The request begins. Once per request: sessions of others that it names are ranked before anything makes room for it."""
        state = state_of(req, self._page_size)
        hints, namespace = self.of(req, state), state.keys.namespace
        self.positions(req)
        for session in hints.end_sessions:
            self._end((namespace, session))
        for session in hints.keep_sessions:
            end = self._known((namespace, session))
            if end is not None:
                self._keep(end.place, SLEEP_REQUESTS, (namespace, session))
        if req.input_embeds is None and req.positional_embed_overrides is None:
            ids = req.full_untruncated_fill_ids
            self._kept.began(lambda at, key: at <= len(ids) and state.keys.at(ids, at) == key)

    def positions(self, req: Any) -> tuple[int, ...]:
        """Return where the client wants checkpoints in its prompt, as they come."""
        state = state_of(req, self._page_size)
        if state.hinted_at is None:
            state.hinted_at = self._find_places(req, state, self.of(req, state))
        return state.hinted_at

    def is_over(self, req: Any) -> bool:
        """Return whether nobody comes back to where the request's answer ends."""
        state = state_of(req, self._page_size)
        hints = self.of(req, state)
        return hints.done or (hints.compact and state.head is not None)

    def finished(self, req: Any) -> None:
        """The request's tokens are in the tree, up to `req.last_node`: rank its session as the client asked."""
        state = state_of(req, self._page_size)
        hints, node = self.of(req, state), req.last_node
        if self._core.node_by_id(node).parent is None:
            return
        # A request that put nothing there may have stopped at another session's end.
        own = req.kv.cache_protected_len > state.kv_covered
        name = (state.keys.namespace, hints.session) if hints.session else None
        if name is not None:
            self._ends.ended(name, node, own=own)
        if self.is_over(req):
            end = None if name is None else self._ends.forget(name)
            start = 0 if hints.done or state.head is None else state.head
            self._over(name, End(node, own) if end is None else end, start)
        elif hints.forks:
            requests = hints.keep_requests or FORK_REQUESTS * hints.forks
            self._keep(node, requests, name, self._forks(req, state, hints.forks))
        elif requests := hints.keep_requests or (SLEEP_REQUESTS if hints.sleep else 0):
            self._keep(node, requests, name)

    def of(self, req: Any, state: RequestState) -> Hints:
        """Return the request's hints; the first time they are counted."""
        if state.hints is None:
            state.hints = parse(req.sampling_params.custom_params)
            for hint in state.hints.given:
                self._counters.hints[hint] += 1
            self._ignore(*state.hints.ignored)
        return state.hints

    def reset(self) -> None:
        """The tree is empty."""
        self._kept.clear()
        self._ends.clear()

    def _find_places(self, req: Any, state: RequestState, hints: Hints) -> tuple[int, ...]:
        total = len(req.full_untruncated_fill_ids)
        found = [at for at in hints.checkpoint_at if at <= total]
        self._ignore(*[Ignored.OUT_OF_RANGE] * (len(hints.checkpoint_at) - len(found)))
        # Whatever a session is about to do, one day its head will be all that is left of it.
        starts = bool(hints.session) and (state.keys.namespace, hints.session) not in self._ends
        if self._structure is None:
            self._ignore(*[Ignored.NO_TEMPLATE] * (bool(hints.before_last) + hints.compact))
        elif hints.before_last or hints.compact or starts:
            spans = prompt_spans(self._structure, req.full_untruncated_fill_ids, MOST_MARKERS)
            begins = message_starts(spans) if hints.before_last else []
            inside = [begins[-back] for back in hints.before_last if back <= len(begins)]
            self._ignore(*[Ignored.OUT_OF_RANGE] * (len(hints.before_last) - len(inside)))
            found += inside
            head = head_end(spans) if hints.compact or starts else None
            if head is not None:
                state.head = head // self._grid * self._grid
                found.append(state.head)
            if hints.compact:
                self._look_for_head(req, state.head)
        return tuple(found)

    def _look_for_head(self, req: Any, head: int | None) -> None:
        if head is None:
            self._ignore(Ignored.NO_TEMPLATE)
        elif 0 < head <= req.prefix_len and not self._kept.has_checkpoint(req.last_node, head):
            self._ignore(Ignored.NOT_COMPUTED)

    def _forks(self, req: Any, state: RequestState, count: int) -> Forks | None:
        """Return how to know the requests that go on from the request's prompt, whether with its answer or without."""
        if req.input_embeds is not None or req.positional_embed_overrides is not None:
            return None  # the token ids do not tell
        ids, end = req.full_untruncated_fill_ids, req.kv.cache_protected_len
        prompt = min(len(req.origin_input_ids), end) // self._grid * self._grid
        position = prompt or end
        return Forks(position, state.keys.at(ids, position), count)

    def _known(self, name: Name) -> End | None:
        """Return where a session ended, None (and counted) if nobody knows or it is there no longer."""
        end = self._ends.find(name)
        if end is None or end.place not in self._ranking.tree:
            self._ignore(Ignored.UNKNOWN_SESSION)
            return None
        return end

    def _end(self, name: Name) -> None:
        end = self._known(name)
        self._ends.forget(name)
        if end is not None:
            self._over(name, end, 0)

    def _over(self, name: Name | None, end: End, start: int) -> None:
        """Nobody comes back to what a session has behind position `start`, unless others have it too."""
        if name is not None or end.own:
            self._kept.release(name, end.place)
        if not end.own or self._ends.any_at(end.place):
            return
        tree = self._ranking.tree
        other = next((node for node in self._kept.above(end.place) if self._ends.any_at(node)), None)
        if other is not None:
            start = max(start, tree.start(other) + tree.tokens(other))
        tree.forsake(end.place, start)

    def _keep(self, node: Any, requests: int, name: Name | None, forks: Forks | None = None) -> None:
        if not self._kept.keep(node, requests, name, forks):
            self._ignore(Ignored.KEPT_ENOUGH)

    def _ignore(self, *reasons: Ignored) -> None:
        for reason in reasons:
            self._counters.hints_ignored[reason] += 1
