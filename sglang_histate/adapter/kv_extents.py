"""Which pages of which tree nodes the SSD has as KV extents.

An extent is a run of pages of one path. A node may be split inside one, so a node's KV is a list of *pieces*, each a
part of an extent, and an extent may have pieces in several nodes, all on one path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """`pages` pages of the extent `key`, from its page `skip` on; they are the node's pages from `at` on."""

    key: bytes
    skip: int
    at: int
    pages: int


class KvExtents:
    """Pages are counted from the start of a node. Only extents in the store's index are in here."""

    def __init__(self) -> None:
        self._pieces: dict[Any, list[Piece]] = {}  # by node, in order, without overlaps
        self._nodes: dict[bytes, list[Any]] = {}  # by extent

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def add(self, node: Any, piece: Piece) -> None:
        """The SSD has these pages of `node`, which it had not before."""
        pieces = self._pieces.setdefault(node, [])
        pieces.append(piece)
        pieces.sort(key=lambda one: one.at)
        self._nodes.setdefault(piece.key, []).append(node)

    def pieces(self, node: Any) -> list[Piece]:
        """Return the node's pieces in order."""
        return self._pieces.get(node, [])

    def keys(self, node: Any) -> list[bytes]:
        """Return the extents with pieces of `node`, in order."""
        return [piece.key for piece in self.pieces(node)]

    def covered(self, node: Any, pages: int) -> bool:
        """Return whether the SSD has all of the node's `pages` pages."""
        return sum(piece.pages for piece in self.pieces(node)) == pages

    def missing(self, node: Any, pages: int) -> list[tuple[int, int]]:
        """Return the runs of pages that the SSD does not have, as (first, count)."""
        runs, at = [], 0
        for piece in self.pieces(node):
            if piece.at > at:
                runs.append((at, piece.at - at))
            at = piece.at + piece.pages
        if at < pages:
            runs.append((at, pages - at))
        return runs

    def split(self, node: Any, upper: Any, pages: int) -> None:
        """The first `pages` pages of `node` belong to `upper` now."""
        for piece in self._take(node):
            above = min(max(pages - piece.at, 0), piece.pages)
            if above:
                self.add(upper, Piece(piece.key, piece.skip, piece.at, above))
            if above < piece.pages:
                rest = Piece(piece.key, piece.skip + above, max(piece.at - pages, 0), piece.pages - above)
                self.add(node, rest)

    def first_page(self, key: bytes) -> tuple[Any, int]:
        """Return the node and its page at which the extent begins, as far as the tree has it."""
        found = [(piece.skip, node, piece.at) for node in self._nodes[key] for piece in self._of(node, key)]
        _, node, at = min(found, key=lambda one: one[0])
        return node, at

    def forget(self, node: Any, first_page: int) -> None:
        """The node's pages from `first_page` on do not count any more; the extents stay for what else they have."""
        for piece in self._take(node):
            left = min(first_page - piece.at, piece.pages)
            if left > 0:
                self.add(node, Piece(piece.key, piece.skip, piece.at, left))

    def removed(self, node: Any) -> list[bytes]:
        """Forget a node; return the extents that no other node has a piece of."""
        return [piece.key for piece in self._take(node) if piece.key not in self._nodes]

    def gone(self, key: bytes) -> list[Any]:
        """Forget an extent; return the nodes that had a piece of it."""
        nodes = self._nodes.pop(key, [])
        for node in nodes:
            left = [piece for piece in self._pieces[node] if piece.key != key]
            if left:
                self._pieces[node] = left
            else:
                del self._pieces[node]
        return nodes

    def _of(self, node: Any, key: bytes) -> list[Piece]:
        return [piece for piece in self._pieces[node] if piece.key == key]

    def _take(self, node: Any) -> list[Piece]:
        pieces = self._pieces.pop(node, [])
        for piece in pieces:
            nodes = self._nodes[piece.key]
            nodes.remove(node)
            if not nodes:
                del self._nodes[piece.key]
        return pieces
