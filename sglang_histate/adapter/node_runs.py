"""Runs of pages on a path of the tree, found again after splits.

A split leaves the node's id on its lower part, so a run that ended in a node still ends in it; what lay before may
belong to new nodes above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """`pages` pages of `node` from its page `at` on; they are the run's pages from `skip` on."""

    node: Any
    at: int
    skip: int
    pages: int


def parts_of_run(node: Any, end: int, first: int, count: int, page_size: int) -> Iterator[Part]:
    """Yield the nodes that hold pages `first` to `first + count` of a path, deepest first.

    `node` holds the last of them and ends after page `end`; pages are counted from the start of the sequence.
    """
    last = first + count
    while node.parent is not None and end > first:
        start = end - len(node.key) // page_size
        begin, stop = max(first, start), min(last, end)
        if begin < stop:
            yield Part(node, begin - start, begin - first, stop - begin)
        node, end = node.parent, start
