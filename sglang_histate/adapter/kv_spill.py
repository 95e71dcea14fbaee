"""KV to the SSD ahead of need: cold host KV is copied there before its room is wanted.

Where few pages of the host arena are free or *clean* (the SSD has them too), the ranking's next bundles are copied, with
what goes after them of the same trajectories, but for those that are worth less than what the SSD gives up: nodes are
locked, a thread copies pages to records, the store writes them. Eviction then finds clean nodes and never waits. Where the
host has little but copies of what the device has, the device lets go of some first: they are what the host could give up
next. How many that is, `policy.reserve` says. KV that no checkpoint on the SSD could restore is not worth a slab.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.counters import Counters
from sglang_histate.adapter.kv_extents import Piece
from sglang_histate.adapter.node_runs import parts_of_run
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.ranks import finished_count
from sglang_histate.copy import Transfer
from sglang_histate.copy.kv_pages import extent_plan, extent_space
from sglang_histate.copy.ordering import FutureMark, Rule, ThreadLane
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.reserve import Reserve
from sglang_histate.policy.units import Kind, Unit
from sglang_histate.store import NO_PARENT, CheckpointStore, PutResult, Record, RecordKind, namespace_of


@dataclass(eq=False)
class Spill:
    """One extent on its way: `pages` pages of the path from page `first` on, in `nodes`, deepest first."""

    nodes: tuple[Any, ...]
    first: int
    page_keys: tuple[bytes, ...]
    parent: bytes
    namespace: bytes
    record: Record
    lock: Any
    copied: FutureMark

    @property
    def pages(self) -> int:
        return len(self.page_keys)

    @property
    def key(self) -> bytes:
        return self.page_keys[-1]


@dataclass(frozen=True, slots=True)
class Run:
    """`pages` pages of a path from page `first` on; the last is in `node_id`, which ends after page `end`."""

    node_id: Any
    end: int
    first: int
    pages: int


class KvSpill:
    """Scheduler thread only, but for `_copy`. Every rank plans alike and finishes the same number in each step."""

    def __init__(
        self, cache: Any, ranking: Ranking, store: CheckpointStore, face: Any, counters: Counters
    ) -> None:
        """`face`: the KV face of the host arena."""
        self._cache = cache
        self._core = cache.tree_core
        self._ranking = ranking
        self._store = store
        self._arena = face.arena
        self._shared = face.shared
        self._page_size = face.page_size
        self._counters = counters
        self._pending: deque[Spill] = deque()
        self._busy: set[Any] = set()  # nodes with copies on their way
        self._refilling = False
        self._fruitless: tuple[int, ...] | None = None
        self._kept: tuple[int, int] | None = None  # when the device let go of all that it could
        self._refused = False  # by the store, in this search
        self._reserve = Reserve(face.arena.total_pages)
        self._taken = 0  # pages that the arena had given out at the last look
        self._lane = ThreadLane("histate-spill")

    def __len__(self) -> int:
        return len(self._pending)

    def plan(self) -> None:
        """Start copies if the reserve is low. Never waits."""
        self._reserve.step(self._arena.taken_pages - self._taken, self._ranking.clock)
        self._taken, low, high = self._arena.taken_pages, self._reserve.low, self._reserve.high
        self._let_go()
        on_the_way = sum(spill.pages for spill in self._pending)
        reserve = self._arena.free_pages + self._ranking.clean_pages + on_the_way
        if reserve >= high:
            self._refilling = False
        elif reserve < low:
            self._refilling = True
        if not self._refilling or self._fruitless == self._situation():
            return
        wanted = high - reserve
        self._refused = False
        while wanted > 0 and self._has_records():
            unit, started = self._ranking.host.victim(self._worth_it), 0
            if unit is not None:
                started = self._start(self._going(unit), wanted, unit.cost_tokens / unit.bytes)
            if not started or self._refused:
                self._fruitless = self._situation()
                return
            wanted -= started

    def _let_go(self) -> None:
        """Have the device let go of what the host has too, if the host could give up too little."""
        ranking = self._ranking
        device = self._cache.token_to_kv_pool_allocator.size // self._page_size
        short = self._reserve.duplicates(self._arena.free_pages, ranking.host_only_pages, device)
        if not short or self._kept == (ranking.clock, ranking.digest):
            return
        ranking.copies_only = True
        try:
            self._cache.evict(EvictParams(num_tokens=short * self._page_size))
        finally:
            ranking.copies_only = False
        self._kept = ranking.clock, ranking.digest

    def _has_records(self) -> bool:
        """Half of the buffers stay for captures and reads."""
        records = self._store.records
        return records.free_for_writes > records.total // 2

    def _situation(self) -> tuple[int, ...]:
        """Return what has to change before a fruitless search is worth another one.

        The digest changes with each eviction: what has left the device may be copied. The room changes when the write
        limits have one more record to give.
        """
        ranking, room = self._ranking, self._store.admission.budget.room
        return ranking.clock, self._arena.free_pages, ranking.clean_pages, ranking.digest, room

    def done_count(self) -> int:
        """Return how many copies have been made, oldest first and without a gap."""
        return finished_count(self._pending, lambda spill: spill.copied.reached(Rule.SPILL))

    def finish(self, count: int) -> None:
        """Hand the `count` oldest copies to the store and unlock their nodes."""
        if count:
            self._fruitless = None  # what was busy may have more to copy
        for spill in [self._pending.popleft() for _ in range(count)]:
            spill.copied.wait(Rule.SPILL)
            self._put(spill)
            self._cache.dec_host_lock_ref(spill.nodes[0], spill.lock)
        self._busy = {node for spill in self._pending for node in spill.nodes}

    def copy(self, nodes: list[Any]) -> int:
        """Start to copy what the SSD lacks of `nodes`, deepest first, as far as there are records; return the pages."""
        most = sum(self._ranking.tree.tokens(node) for node in nodes)
        self._refused = False
        return self._start([node for node in nodes if self._can_go(node)], most)

    def reset(self) -> None:
        """The tree is being emptied, its locks with it."""
        for spill in self._pending:
            spill.copied.wait(Rule.QUIET)
            self._store.release_record(spill.record)
        self._pending.clear()
        self._busy.clear()
        self._refilling = False

    def close(self) -> None:
        self._lane.close()

    def _worth_it(self, unit: Unit) -> bool:
        if unit.kind is not Kind.BUNDLE or unit.checkpoint is None:
            return False
        if self._core.node_by_id(unit.nodes[0]) not in self._core.evictable_host_leaves:
            return False
        if not self._ranking.has_checkpoint(unit.checkpoint, Tier.SSD):
            return False
        if self._busy & set(unit.nodes):
            return False
        ahead = not any(self._can_go(node) for node in unit.nodes)
        age = max(self._ranking.clock - unit.last_access, 0)
        if not self._ranking.scarcity.worth_copying(
            unit.cost_tokens, unit.bytes, age, self._store.fill, ahead
        ):
            return False
        if not ahead:
            return True
        # What the SSD has of a trajectory may be its last pages only: those before them go right after.
        going = self._going(unit)
        return bool(going) and going[0] not in self._busy

    def _can_go(self, node: Any) -> bool:
        """Return whether the SSD can take more of a node's KV."""
        return node in self._ranking.ssd.names and not self._ranking.ssd.has_kv(node)

    def _going(self, unit: Unit) -> list[Any]:
        """Return the bundle's nodes, deepest first, and those above that go after it: no other trajectory needs them."""
        nodes, tree = list(unit.nodes), self._ranking.tree
        above = self._core.node_by_id(nodes[-1]).parent
        while above.parent is not None and above.evicted and above.backuped:
            if sum(tree.has_kv(child.id, Tier.HOST) for child in above.children.values()) > 1:
                break
            nodes.append(above.id)
            above = above.parent
        return [node for node in nodes if self._can_go(node)]

    def _start(self, nodes: list[Any], wanted: int, value: float | None = None) -> int:
        """Copy what the SSD does not have of the nodes, as far as there are records; return how many pages that is.

        `value` is what they save, in tokens of recomputation per byte; None is worth any price.

        An extent goes on over the end of a node where the next one has to go too: a turn of a session is often less than
        a slab, and a slab that is half empty is half lost.
        """
        most, started = self._store.layout.pages_per_extent, 0
        for run in self._runs(nodes):
            # Cut from the start, so that what the session gets next continues the last one; deepest first, as they go.
            for first in reversed(range(run.first, run.first + run.pages, most)):
                if started >= wanted or not self._has_records():
                    return started
                pages = min(most, run.first + run.pages - first)
                self._copy_extent(run, first, pages, value)
                if self._refused:
                    return started
                started += pages
        return started

    def _runs(self, nodes: list[Any]) -> list[Run]:
        """Return the longest runs of pages that the SSD does not have, the deepest first."""
        runs: list[Run] = []
        tree, size = self._ranking.tree, self._page_size
        for node in nodes:
            if node in self._busy:
                break
            before, pages = tree.start(node) // size, tree.tokens(node) // size
            for at, count in reversed(self._ranking.ssd.extents.missing(node, pages)):
                if runs and runs[-1].first == before + at + count:
                    runs[-1] = Run(runs[-1].node_id, runs[-1].end, before + at, runs[-1].pages + count)
                else:
                    runs.append(Run(node, before + pages, before + at, count))
        return runs

    def _copy_extent(self, run: Run, first: int, count: int, value: float | None) -> None:
        size, names = self._page_size, self._ranking.ssd.names
        node = self._core.node_by_id(run.node_id)
        parts = list(parts_of_run(node, run.end, first, count, size))
        last = names.of(parts[0].node.id)[parts[0].at + parts[0].pages - 1]
        record = self._store.claim_record(last, value, kind=RecordKind.KV, n_pages=count)
        if isinstance(record, PutResult):
            self._counters.kv_spills_refused += 1
            self._refused = True
            return
        pages: list[int] = []
        page_keys: list[bytes] = []
        for part in reversed(parts):
            host = part.node.component_data[ComponentType.FULL].host_value
            tokens = host[part.at * size : (part.at + part.pages) * size : size]
            pages += [int(token) // size for token in tokens]
            page_keys += names.of(part.node.id)[part.at : part.at + part.pages]
        deepest, top = parts[0], parts[-1]
        parent = names.of(top.node.id)[top.at - 1] if top.at else self._name_before(top.node)
        # What is above a locked node of the host cannot go either.
        lock = self._cache.inc_host_lock_ref(deepest.node.id).to_dec_params()
        self._lane.run(partial(self._copy, record, pages))
        copied = self._lane.mark()
        nodes = tuple(part.node.id for part in parts)
        self._busy.update(nodes)
        namespace = namespace_of(node.key.extra_key, node.key.cache_salt)
        self._pending.append(Spill(nodes, first, tuple(page_keys), parent, namespace, record, lock, copied))

    def _name_before(self, node: Any) -> bytes:
        above = node.parent
        if above.parent is None or above.id not in self._ranking.ssd.names:
            return NO_PARENT
        return self._ranking.ssd.names.of(above.id)[-1]

    def _copy(self, record: Record, pages: list[int]) -> None:
        """Spill thread: the pages are locked, the record is nobody else's."""
        plan = extent_plan(pages, range(len(pages)), self._arena.page_bytes)
        self._shared.host_engine.submit([Transfer(plan, self._shared.space, extent_space(record.kv_pages))])

    def _put(self, spill: Spill) -> None:
        at_token = (spill.first + spill.pages) * self._page_size
        result = self._store.put_extent(
            spill.page_keys, at_token, spill.record, parent=spill.parent, namespace=spill.namespace
        )
        first, pages, hidden = spill.first, spill.pages, 0
        if result is PutResult.ALREADY_STORED:
            # From another time; it ends with the same page, but may begin elsewhere.
            entry = self._store.lookup(spill.key, RecordKind.KV)
            assert entry is not None
            pages = min(pages, entry.n_pages)
            first, hidden = spill.first + spill.pages - pages, entry.n_pages - pages
        elif result is not PutResult.STORED:
            self._counters.kv_spills_refused += 1
            self._fruitless = self._situation()
            return
        else:
            self._counters.kv_spilled_pages += spill.pages
        node = self._core.node_by_id(spill.nodes[0])
        end = (self._ranking.tree.start(node.id) + len(node.key)) // self._page_size
        for part in parts_of_run(node, end, first, pages, self._page_size):
            piece = Piece(spill.key, hidden + part.skip, part.at, part.pages)
            self._ranking.ssd.place_extent(spill.key, part.node.id, piece)
