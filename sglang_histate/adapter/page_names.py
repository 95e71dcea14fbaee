"""The page hashes of each tree node: the names under which its KV goes to the SSD."""

from __future__ import annotations

from typing import Any


class PageNames:
    """Filled from requests, which know the hashes of their pages anyway; a node without names stays off the SSD."""

    def __init__(self) -> None:
        self._names: dict[Any, list[bytes]] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self._names

    def set(self, node: Any, names: list[bytes]) -> None:
        self._names[node] = names

    def of(self, node: Any) -> list[bytes]:
        """Return one 32-byte hash a page.

        Raises:
            KeyError: no request has named the node.
        """
        return self._names[node]

    def split(self, node: Any, upper: Any, pages: int) -> None:
        """The first `pages` pages of `node` belong to `upper` now."""
        names = self._names.get(node)
        if names is not None:
            self._names[upper], self._names[node] = names[:pages], names[pages:]

    def removed(self, node: Any) -> None:
        self._names.pop(node, None)
