"""A radix tree over pages: which prefixes were computed, in runs of pages.

It knows names of pages and nothing about bytes. What is kept per run beside it is told of every new run, split
and removal by overriding `_added`, `_split` and `_removed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from eval.simulate.jobs import Pages
from eval.workloads.sessions import common

if TYPE_CHECKING:
    from eval.simulate.extents import Piece


class Run:
    """Pages in a row below `parent`; `start` is how many come before them. The root has none."""

    __slots__ = (
        "children",
        "device_locks",
        "extents",
        "host_locks",
        "id",
        "kv",
        "pages",
        "parent",
        "start",
        "states",
    )

    def __init__(self, name: int, parent: Run | None, start: int, pages: Pages) -> None:
        self.id = name
        self.parent = parent
        self.start = start
        self.pages = pages
        self.children: dict[int, Run] = {}
        # What `contents` keeps here: tiers that have the KV as bits; checkpoints by how many of the run's pages
        # they have read; what the SSD has of it, first to last, which is all of it where `kv` says so; how many
        # requests need the run on the device and on the host.
        self.kv = 0
        self.states: dict[int, State] = {}
        self.extents: list[Piece] = []
        self.device_locks = 0
        self.host_locks = 0

    @property
    def end(self) -> int:
        """Pages from the root to the run's end."""
        return self.start + len(self.pages)

    def path(self) -> Iterator[Run]:
        """Yield the run and all above it but the root."""
        run: Run | None = self
        while run is not None and run.parent is not None:
            yield run
            run = run.parent


class State:
    """A checkpoint after `page` pages of `run`; `tiers` that have it as bits; tick of its last own use."""

    __slots__ = ("page", "run", "tiers", "used")

    def __init__(self, run: Run, page: int, used: int) -> None:
        self.run = run
        self.page = page
        self.tiers = 0
        self.used = used


class Step(NamedTuple):
    """A run on the way of a match, and how many of its pages match."""

    run: Run
    pages: int


class RadixTree:
    """Runs below `root`."""

    def __init__(self) -> None:
        self.root = Run(0, None, 0, ())
        self._names = 0

    def match(self, pages: Pages) -> list[Step]:
        """Return the runs that the pages begin with, from the root down; only the last may match in part."""
        found: list[Step] = []
        run, at = self.root, 0
        while at < len(pages):
            below = run.children.get(pages[at])
            if below is None:
                break
            length = len(below.pages)
            same = length if pages[at : at + length] == below.pages else common(below.pages, pages[at:])
            found.append(Step(below, same))
            at += same
            if same < length:
                break
            run = below
        return found

    def extend(self, run: Run, pages: Pages, end: int) -> list[Run]:
        """Have the first `end` pages in the tree, given that `run` ends on their way; return the runs after it.

        The last one ends exactly there: a run that goes on is split.
        """
        path: list[Run] = []
        at = run.end
        while at < end:
            below = run.children.get(pages[at])
            if below is None:
                below = self._add(run, pages[at:end])
            else:
                length = len(below.pages)
                if pages[at : min(at + length, end)] != below.pages:
                    below = self.split(below, common(below.pages, pages[at:end]))
            path.append(below)
            run, at = below, below.end
        return path

    def _add(self, parent: Run, pages: Pages) -> Run:
        self._names += 1
        run = Run(self._names, parent, parent.end, pages)
        parent.children[pages[0]] = run
        self._added(run)
        return run

    def split(self, run: Run, pages: int) -> Run:
        """Cut a run after so many of its pages, more than none and less than all; return the new upper part."""
        assert run.parent is not None and 0 < pages < len(run.pages)
        self._names += 1
        upper = Run(self._names, run.parent, run.start, run.pages[:pages])
        run.parent.children[upper.pages[0]] = upper
        upper.children[run.pages[pages]] = run
        run.parent, run.start, run.pages = upper, upper.end, run.pages[pages:]
        self._split(run, upper)
        return upper

    def remove(self, run: Run) -> None:
        """Remove a run without children."""
        assert run.parent is not None and not run.children
        del run.parent.children[run.pages[0]]
        self._removed(run)
        run.parent = None

    def _added(self, run: Run) -> None:
        """`run` is new."""

    def _split(self, run: Run, upper: Run) -> None:
        """`upper` was made of the first pages of `run`."""

    def _removed(self, run: Run) -> None:
        """`run` is gone; its parent is still named."""
