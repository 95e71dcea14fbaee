"""What an earlier server left on the SSD, until a request comes that has it in its prompt.

A store that is opened again knows keys, the tree is empty. Tokens come with requests: a prompt's page hashes say which
of the pages are there, and only then do they get nodes. So nothing is restored before somebody asks, and nothing that
nobody asks for is in the way: it gives up its slabs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_histate.store import Entry, Key, RecordKind


@dataclass(frozen=True, slots=True)
class Stretch:
    """`pages` pages of the extent `key`, from its page `skip` on, found at page `at` of what was asked for."""

    key: bytes
    skip: int
    at: int
    pages: int


class Recovered:
    """Pages of KV and checkpoints by hash. What got a place in the tree is not in here any more."""

    def __init__(self) -> None:
        self._holders: dict[bytes, list[tuple[bytes, int]]] = {}  # page -> extents that have it, and where
        self._extents: dict[bytes, tuple[bytes, ...]] = {}
        self._checkpoints: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._holders or self._checkpoints)

    def add(self, entry: Entry) -> None:
        """`entry` was found when the store was opened."""
        if entry.kind is RecordKind.CHECKPOINT:
            self._checkpoints.add(entry.key)
            return
        self._extents[entry.key] = entry.page_keys
        for at, page in enumerate(entry.page_keys):
            self._holders.setdefault(page, []).append((entry.key, at))

    def gone(self, name: Key) -> None:
        """The store has `name` no more."""
        if name.kind is RecordKind.CHECKPOINT:
            self._checkpoints.discard(name.hash)
            return
        for page in self._extents.pop(name.hash, ()):
            holders = [one for one in self._holders.get(page, ()) if one[0] != name.hash]
            if holders:
                self._holders[page] = holders
            else:
                self._holders.pop(page, None)

    def has_page(self, page: bytes) -> bool:
        return page in self._holders

    def take_pages(self, pages: Sequence[bytes]) -> list[Stretch]:
        """Return where the KV of `pages` is, in order, and forget these pages: they have a place now."""
        found: list[Stretch] = []
        for at, page in enumerate(pages):
            holders = self._holders.pop(page, None)
            if holders is None:
                continue
            last = found[-1] if found else None
            if (
                last is not None
                and last.at + last.pages == at
                and (last.key, last.skip + last.pages) in holders
            ):
                found[-1] = Stretch(last.key, last.skip, last.at, last.pages + 1)
            else:
                found.append(Stretch(*holders[0], at, 1))
        return found

    def take_checkpoints(self, pages: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield index and hash of the pages at whose end a checkpoint is, and forget it: it has a place now."""
        if not self._checkpoints:
            return
        for at, page in enumerate(pages):
            if page in self._checkpoints:
                self._checkpoints.discard(page)
                yield at, page


def by_worth(entries: Iterable[Entry]) -> list[Key]:
    """Return the names of recovered entries, those to give up first in front.

    `entries` are in the order of their last use, oldest first. What was used last stays longest, with all that it needs:
    KV is of no use without the KV before it, so of one path the deepest goes first.
    """
    held = list(entries)
    page_of = {page: entry for entry in held if entry.kind is RecordKind.KV for page in entry.page_keys}
    seen: set[Key] = set()
    best_first: list[Key] = []
    for entry in reversed(held):
        path: list[Key] = []
        step: Entry | None = entry
        while step is not None and step.name not in seen:
            seen.add(step.name)
            path.append(step.name)
            step = page_of.get(step.key if step.kind is RecordKind.CHECKPOINT else step.parent)
        best_first += reversed(path)  # from the root down, so that in reverse each goes before what it needs
    return best_first[::-1]
