"""How far the SSD's KV goes on where a request's KV on device and host ends."""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.request_state import RequestState


def dead_path(cache: Any, req: Any, state: RequestState, page_size: int) -> tuple[list[Any], int]:
    """Return the dead nodes that continue the request's resident KV, and the position that they reach, in tokens.

    Pages that an earlier server left on the SSD get their nodes here.
    """
    return _Walk(cache, req, state, page_size).walk()


class _Walk:
    def __init__(self, cache: Any, req: Any, state: RequestState, page_size: int) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._ssd = cache.tree_core.ranking.ssd
        self._tokens = req.full_untruncated_fill_ids
        self._state = state
        self._page_size = page_size
        self._length = len(self._tokens) // page_size * page_size
        self._radix_key: Any = None

    def walk(self) -> tuple[list[Any], int]:
        core, state = self._core, self._state
        node = core.root_node if state.last_visited is None else core.node_by_id(state.last_visited)
        reach = state.kv_covered
        dead: list[Any] = []
        while reach < self._length and (child := self._below(node, reach)) is not None:
            if not core.is_dead(child) or not self._ssd.has_kv(child.id):
                break
            matched = child.key.match_at(self._key, reach, page_size=self._page_size)
            reach += matched
            if matched < len(child.key):
                if not self._was_recovered(reach):
                    dead.append(child)
                    break
                child, actions = core.cut(child, matched)
                self._cache._apply_cache_actions(actions)
            dead.append(child)
            node = child
        return dead, reach

    @property
    def _key(self) -> Any:
        if self._radix_key is None:
            self._radix_key = self._state.keys.radix_key(self._tokens, self._length)
        return self._radix_key

    def _below(self, node: Any, start: int) -> Any | None:
        """Return the child of `node` that goes on with the prompt, which may be a new one."""
        if node.children:
            child = node.children.get(self._key.child_key_at(start, self._page_size))
            if child is not None:
                return child
        end = start
        while self._was_recovered(end):
            end += self._page_size
        if end == start:
            return None
        planted = self._core.plant(node, self._key[start:end])
        self._ssd.names.set(planted.id, self._state.keys.between(self._tokens, start, end))
        self._ssd.adopt(planted.id)
        return planted

    def _was_recovered(self, start: int) -> bool:
        """Return whether the page from `start` on came with the store and has no node yet."""
        end = start + self._page_size
        if not self._ssd.recovered or end > self._length:
            return False
        return self._ssd.recovered.has_page(self._state.keys.at(self._tokens, end))
