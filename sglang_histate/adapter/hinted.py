"""What becomes of clients' hints: positions for the capture plan, and how a finished session is ranked.

All ranks get the same requests, so all do the same.
"""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.counters import Counters
from sglang_histate.adapter.hints import Hints, Ignored, parse
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.request_state import RequestState, state_of
from sglang_histate.adapter.token_spans import MOST_MARKERS, prompt_spans
from sglang_histate.policy.retention import Retention
from sglang_histate.policy.structure import Structure, message_starts


class HintedSessions:
    """Scheduler thread only. `structure`: None where no chat template tells where messages begin."""

    def __init__(
        self,
        core: Any,
        ranking: Ranking,
        retention: Retention,
        counters: Counters,
        *,
        structure: Structure | None,
        session_bytes: tuple[int, int],
        page_size: int,
    ) -> None:
        """`session_bytes`: of a token of KV, and of a checkpoint."""
        self._core = core
        self._ranking = ranking
        self._retention = retention
        self._counters = counters
        self._structure = structure
        self._token_bytes, self._state_bytes = session_bytes
        self._page_size = page_size

    def of(self, req: Any, state: RequestState) -> Hints:
        """Return the request's hints; the first time they are counted."""
        if state.hints is None:
            state.hints = parse(req.sampling_params.custom_params)
            for hint in state.hints.given:
                self._counters.hints[hint] += 1
            for reason in state.hints.ignored:
                self._counters.hints_ignored[reason] += 1
        return state.hints

    def positions(self, req: Any, state: RequestState) -> list[int]:
        """Return where the client wants checkpoints in its prompt, as they come."""
        total = len(req.full_untruncated_fill_ids)
        first = state.hints is None
        hints = self.of(req, state)
        found = [at for at in hints.checkpoint_at if at <= total]
        lost = [Ignored.OUT_OF_RANGE] * (len(hints.checkpoint_at) - len(found))
        if hints.before_last and self._structure is None:
            lost.append(Ignored.NO_TEMPLATE)
        elif hints.before_last and self._structure is not None:
            spans = prompt_spans(self._structure, req.full_untruncated_fill_ids, MOST_MARKERS)
            starts = message_starts(spans)
            inside = [starts[-back] for back in hints.before_last if back <= len(starts)]
            lost += [Ignored.OUT_OF_RANGE] * (len(hints.before_last) - len(inside))
            found += inside
        if first:
            for reason in lost:
                self._counters.hints_ignored[reason] += 1
        return found

    def finished(self, req: Any) -> None:
        """The request's tokens are in the tree, up to `req.last_node`: rank its session as the client asked."""
        state = state_of(req, self._page_size)
        hints, tokens = self.of(req, state), req.kv.cache_protected_len
        node = self._core.node_by_id(req.last_node)
        if node.parent is None:
            return
        # A request that put nothing there may have stopped at another session's end.
        if hints.done and tokens > state.kv_covered:
            self._retention.release(node.id)
            self._ranking.tree.forsake(node.id)
        elif hints.keep_requests and not hints.done:
            self._keep(node, tokens, hints.keep_requests)

    def _keep(self, node: Any, tokens: int, requests: int) -> None:
        # The session has come this way: its tokens are kept once, its checkpoints each.
        above = node.parent
        while above.parent is not None:
            self._retention.shrink(above.id, self._state_bytes)
            above = above.parent
        size = tokens * self._token_bytes + self._state_bytes
        until = self._retention.keep(node.id, size, self._ranking.clock, requests)
        if until is None:
            self._counters.hints_ignored[Ignored.KEPT_ENOUGH] += 1
            return
        while node.parent is not None and not self._ranking.tree.checkpoints(node.id):
            node = node.parent
        if node.parent is not None:
            offset, _ = self._ranking.tree.checkpoints(node.id)[-1]
            self._ranking.tree.keep(node.id, offset, until)

    def reset(self) -> None:
        """The tree is empty."""
        self._retention.clear()
