"""KV from the SSD back to the host: the extents of a run of dead nodes, read into pages of the arena.

Reads are begun as far as there are record buffers and go on as they end. When all have ended, the nodes get their host
copies, from the top down; what the tree has by then from elsewhere is left alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.landing import Landing
from sglang_histate.adapter.node_runs import parts_of_run
from sglang_histate.copy import Transfer
from sglang_histate.copy.kv_pages import extent_plan, extent_space
from sglang_histate.store import CheckpointStore, MissReason, ReadTicket, Record, RecordKind

READ_AHEAD = 4  # buffers that a restore leaves to other reads


@dataclass(frozen=True, slots=True)
class _Read:
    key: bytes
    skip: int
    pages: tuple[int, ...]  # of the arena


class KvRestore:
    """One run: whole nodes of one path, `first` tokens into it up to the end of `node_id`. Scheduler thread only.

    `indices` are the host tokens for the whole run, allocated by the caller and owned from now on.
    """

    def __init__(
        self,
        cache: Any,
        store: CheckpointStore,
        face: Any,
        node_id: Any,
        first: int,
        end: int,
        indices: torch.Tensor,
    ) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._store = store
        self._face = face
        self._node_id = node_id
        self._first, self._end = first, end
        self._indices = indices
        self._todo: deque[_Read] = deque()
        self._tickets: dict[int, ReadTicket] = {}
        self._landing = Landing()
        self.failed = False
        self._plan()

    @property
    def pages(self) -> int:
        return (self._end - self._first) // self._face.page_size

    @property
    def ended(self) -> bool:
        return not self._tickets and (self.failed or not self._todo)

    def pump(self) -> list[ReadTicket]:
        """Begin reads while there are buffers; return their tickets."""
        begun: list[ReadTicket] = []
        while self._todo and not self.failed:
            if self._store.records.free <= min(READ_AHEAD, self._store.records.total // 4):
                break
            read = self._todo.popleft()
            ticket = self._store.begin_read(
                read.key, deliver=partial(self._deliver, read), kind=RecordKind.KV
            )
            if isinstance(ticket, MissReason):
                self.failed = True
                break
            self._tickets[id(ticket)] = ticket
            begun.append(ticket)
        return begun

    def complete(self, ticket: ReadTicket) -> None:
        """A read was committed on all ranks."""
        del self._tickets[id(ticket)]
        if ticket.ok:
            self._store.release(ticket)
        else:
            self.failed = True

    def cancel(self) -> None:
        """The pages belong to the arena again: no thread may write to them."""
        self._landing.cancel()

    def give_up(self) -> None:
        """Free the pages without using them."""
        self._face.free(self._indices)

    def attach(self) -> bool:
        """Give the nodes their host copies; return whether the whole run is on the host now."""
        core, ranking, size = self._core, self._core.ranking, self._face.page_size
        if self._node_id not in ranking.tree:
            self.give_up()
            return False
        node = core.node_by_id(self._node_id)
        end = ranking.tree.start(self._node_id) + len(node.key)
        if end != self._end:
            self.give_up()
            return False
        parts = list(parts_of_run(node, end // size, self._first // size, self.pages, size))
        whole = True
        for part in reversed(parts):
            mine = self._indices[part.skip * size : (part.skip + part.pages) * size]
            full = part.node.component_data[ComponentType.FULL]
            above = part.node.parent
            fits = (
                whole
                and part.pages * size == len(part.node.key)
                and full.host_value is None
                and part.node.write_through_pending_id is None
                and (above.parent is None or above.backuped)
            )
            if fits:
                full.host_value = mine.clone()
                core.kv_events.record_store(part.node, medium=StorageMedium.CPU)
                core._update_evictable_leaf_sets(part.node)
                core._update_evictable_leaf_sets(above)
                core._update_duplicate_tracking(part.node)
            else:
                self._face.free(mine)
                whole = whole and full.host_value is not None
        return whole

    def _plan(self) -> None:
        """List the reads, from the top down."""
        ranking, size = self._core.ranking, self._face.page_size
        node = self._core.node_by_id(self._node_id)
        parts = list(parts_of_run(node, self._end // size, self._first // size, self.pages, size))
        pages = (self._indices[::size] // size).tolist()
        for part in reversed(parts):
            for piece in ranking.ssd.extents.pieces(part.node.id):
                begin, stop = max(piece.at, part.at), min(piece.at + piece.pages, part.at + part.pages)
                if begin < stop:
                    at = part.skip + begin - part.at
                    self._read(piece.key, piece.skip + begin - piece.at, pages[at : at + stop - begin])

    def _read(self, key: bytes, skip: int, pages: list[int]) -> None:
        """Add a read, or let the one before go on where both are of one extent, so that it is read once."""
        last = self._todo[-1] if self._todo else None
        if last is not None and last.key == key and last.skip + len(last.pages) == skip:
            self._todo[-1] = _Read(key, last.skip, (*last.pages, *pages))
        else:
            self._todo.append(_Read(key, skip, tuple(pages)))

    def _deliver(self, read: _Read, record: Record, verified: range) -> None:
        """Reader thread: copy verified pages into the arena."""
        shared = self._face.shared
        places = [at for at in range(read.skip, read.skip + len(read.pages)) if at in verified]
        if not places:
            return
        pages = [read.pages[at - read.skip] for at in places]
        plan = extent_plan(pages, places, shared.arena.page_bytes).reversed()
        copy = Transfer(plan, extent_space(record.kv_pages), shared.space)
        self._landing.copy(lambda: shared.host_engine.submit([copy]))
