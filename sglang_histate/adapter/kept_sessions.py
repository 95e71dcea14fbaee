"""What clients ask to keep, as the ranking sees it: checkpoints that rank as if used later, within the share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from sglang_histate.adapter.ranking import Ranking
from sglang_histate.policy.retention import Forks, Owner, Retention, Spot


class KeptSessions:
    """Scheduler thread only. A session ends at a node of the tree, which keeps its id when it is split, as its lower part.

    `token_bytes`, `state_bytes`: of the KV of one token, and of one checkpoint.
    """

    def __init__(self, ranking: Ranking, retention: Retention, *, token_bytes: int, state_bytes: int) -> None:
        self._ranking = ranking
        self._retention = retention
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes

    def keep(self, node: Any, requests: int, owner: Owner, forks: Forks | None = None) -> bool:
        """Keep the session that ends with `node`, for so many requests or until its forks came; False if there is no room for it."""
        tree = self._ranking.tree
        end = tree.start(node) + tree.tokens(node)
        wanted = {self._last_before(node, end)}
        if forks is not None:
            wanted.add(self._last_before(node, forks.position))
        positions = tuple(sorted(wanted - {0}))
        granted = self._retention.keep(
            node,
            positions,
            token_bytes=end * self._token_bytes,
            state_bytes=max(len(positions), 1) * self._state_bytes,
            now=self._ranking.clock,
            requests=requests,
            owner=owner,
            above=set(self.above(node)),
            forks=forks,
        )
        if granted is None:
            return False
        self._rank(granted.dropped)
        self._rank((node, position) for position in positions)
        return True

    def release(self, owner: Owner, node: Any) -> None:
        """Keep the session no longer that is called so, or that has no name and ends with `node`."""
        self._rank(self._retention.release(owner, node))

    def began(self, begins_with: Callable[[int, bytes], bool]) -> None:
        """A request begins: if forks were expected, it may be one. See `Retention.began`."""
        self._rank(self._retention.began(self._ranking.clock, begins_with))

    def above(self, node: Any) -> Iterator[Any]:
        """Yield the nodes that a session came through, deepest first."""
        tree = self._ranking.tree
        above = tree.parent(node)
        while above is not None and above != tree.root:
            yield above
            above = tree.parent(above)

    def has_checkpoint(self, node: Any, position: int) -> bool:
        """Return whether there is a checkpoint at `position`, which lies at or before the end of `node`."""
        return self._last_before(node, position) == position

    def clear(self) -> None:
        """The tree is empty."""
        self._retention.clear()

    def _rank(self, spots: Iterable[Spot]) -> None:
        """Let the checkpoints there rank by what was last said of them."""
        for node, position in spots:
            if node in self._ranking.tree:
                within, offset = self._locate(node, position)
                self._ranking.tree.keep(within, offset, self._retention.until(node, position))

    def _locate(self, node: Any, position: int) -> tuple[Any, int]:
        """Return which node has the token before `position`, and how many of its tokens that are."""
        tree = self._ranking.tree
        while tree.start(node) >= position:
            node = tree.parent(node)
        return node, position - tree.start(node)

    def _last_before(self, node: Any, position: int) -> int:
        """Return the position of the deepest checkpoint up to `position` on the way to the end of `node`, 0 if there is none."""
        tree = self._ranking.tree
        for one in chain([node], self.above(node)):
            start = tree.start(one)
            for offset, _ in reversed(tree.checkpoints(one)):
                if start + offset <= position:
                    return start + offset
        return 0
