"""The eviction ranking of one rank: the policy's mirror of SGLang's radix tree, and one queue per pool.

The tree core reports nodes and where their data is, the cache reports accesses; all of it is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.attribution import Absences
from sglang_histate.adapter.policy_time import PolicyTime
from sglang_histate.adapter.ssd_contents import SsdContents
from sglang_histate.policy.clean import CleanKv
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.placement import NO_COPIES, Copies, Reason, place
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence
from sglang_histate.policy.scarcity import Scarcity
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit
from sglang_histate.store import CheckpointStore, DropReason, Key, RecordKind

_KV_DEVICE, _KV_HOST, _STATE_DEVICE, _STATE_HOST = 1, 2, 4, 8
_KV = _KV_DEVICE | _KV_HOST


@dataclass(frozen=True)
class Sizes:
    """Of one rank. `state`: bytes of one checkpoint, `kv_token`: bytes of the KV of one token, `page`: tokens of a page,
    `state_pages`: pages that a checkpoint takes in the host arena.

    On the SSD: `slab` bytes, of which `slab_pages` pages of KV fill one (0: the SSD takes no KV).
    """

    state: int
    kv_token: int
    page: int
    state_pages: int
    slab: int
    slab_pages: int

    @property
    def slab_kv_token(self) -> int:
        """Bytes that a token of KV takes on the SSD, rounded up; 0 if it takes none."""
        return -(-self.slab // (self.slab_pages * self.page)) if self.slab_pages else 0


class Ranking:
    """Scheduler thread only. `one_device_pool`: KV and states share the device's bytes, as they share the host's."""

    def __init__(
        self,
        root: Any,
        *,
        sizes: Sizes,
        mode: Eviction,
        tau: float,
        one_device_pool: bool,
        journal: Journal | None = None,
    ) -> None:
        self._sizes = sizes
        self._mode = mode
        self._tau = tau
        self._one_device_pool = one_device_pool
        self._journal = journal
        self._store: CheckpointStore | None = None
        self.absences = Absences()  # why the SSD has no checkpoint where there could be one
        self.policy_time = PolicyTime()
        self.copies_only = False  # the device lets go of KV that the host has too, and of nothing else
        self.kept: set[Key] = set()  # never makes room on the SSD: what is saved before an exit
        self.clock = 0
        # All names from the start, so that a dashboard never misses a series.
        self.evictions = {f"{tier.name.lower()}_{kind.value}": 0 for tier in Tier for kind in Kind}
        self.fates = dict.fromkeys(Reason, 0)
        # Of all victims so far: two ranks with the same number have evicted the same.
        self.digest = 0
        self.residence = Residence() if journal is None else journal.residence()
        self.scarcity = Scarcity()
        self.reset(root)

    def reset(self, root: Any) -> None:
        """Start again with an empty tree. The clock goes on."""
        self.absences.clear()
        if self._journal is None:
            self.tree = PrefixTree(root)
        else:
            self.tree = self._journal.tree(root, self._tau, self._mode, self._sizes.kv_token)
        self._where: dict[Any, int] = {root: 0}
        self._since: dict[Any, int] = {}  # node -> when it came, oldest first but for splits
        state, kv = self._sizes.state, self._sizes.kv_token
        self.device_kv = self._queue("device", Pool(Tier.DEVICE, state if self._one_device_pool else 0, kv))
        self.device_states = (
            self.device_kv
            if self._one_device_pool
            else self._queue("device states", Pool(Tier.DEVICE, state, 0))
        )
        self.host = self._queue("host", Pool(Tier.HOST, state, kv))
        ssd_queue = self._queue("ssd", Pool(Tier.SSD, self._sizes.slab, self._sizes.slab_kv_token))
        self._clean = CleanKv(self.tree)
        self.ssd = SsdContents(
            self.tree, ssd_queue, self._sizes.page, self.residence.state, self._clean.changed
        )

    def _queue(self, name: str, pool: Pool) -> EvictionQueue:
        settings = self._sizes.kv_token, self._tau, self._mode
        if self._journal is None:
            return EvictionQueue(self.tree, pool, *settings)
        return self._journal.queue(name, self.tree, pool, *settings)

    @property
    def clean_pages(self) -> int:
        """Pages of the host whose KV could go at once and would cost nothing but a read."""
        return self._clean.tokens // self._sizes.page

    @property
    def host_only_pages(self) -> int:
        """Pages of KV that the host has and the device has not: what can leave the host at all."""
        return self._clean.host_only_tokens // self._sizes.page

    def host_pages(self, *, kv_tokens: int, states: int) -> int:
        """Return the pages that KV and states take in the host arena; `kv_tokens` in whole pages."""
        return kv_tokens // self._sizes.page + states * self._sizes.state_pages

    def passes_through(self, node: Any) -> bool:
        """Return whether the host state at the end of `node` is an intermediate checkpoint that the SSD has too."""
        final = not any(self.tree.has_kv(child.id, Tier.HOST) for child in node.children.values())
        return not final and self.has_checkpoint((node.id, len(node.key)), Tier.SSD)

    def has_checkpoint(self, place: tuple[Any, int], tier: Tier) -> bool:
        """Return whether `tier` has the checkpoint at (node, offset)."""
        node, offset = place
        return any(at == offset and tier in tiers for at, tiers in self.tree.checkpoints(node))

    # What the tree core reports.

    def sync(self, node: Any) -> None:
        """Take over where `node`'s data is; a node seen for the first time is new."""
        before = self._where.get(node.id)
        if before is None:
            if not self._is_in_tree(node):
                return
            self.tree.add(node.id, node.parent.id, len(node.key))
            before = 0
        full, state = node.component_data[ComponentType.FULL], node.component_data[ComponentType.MAMBA]
        now = (
            _KV_DEVICE * (full.value is not None)
            + _KV_HOST * (full.host_value is not None)
            + _STATE_DEVICE * (state.value is not None)
            + _STATE_HOST * (state.host_value is not None)
        )
        self._where[node.id] = now
        changed = now ^ before
        if not changed or node.parent is None:
            return
        if now & _KV and not before & _KV:
            self._since[node.id] = self.clock
        elif before & _KV and not now & _KV:
            self.residence.kv.evicted(self._since.pop(node.id), self.clock)
        for bit, tier in ((_KV_DEVICE, Tier.DEVICE), (_KV_HOST, Tier.HOST)):
            if changed & bit:
                self.tree.set_kv(node.id, tier, bool(now & bit))
        for bit, tier in ((_STATE_DEVICE, Tier.DEVICE), (_STATE_HOST, Tier.HOST)):
            if changed & bit:
                self.tree.set_checkpoint(node.id, len(node.key), tier, bool(now & bit))
        if changed & _KV:
            self._clean.changed(node.id)

    def _is_in_tree(self, node: Any) -> bool:
        parent = node.parent
        if parent is None or parent.id not in self._where:
            return False
        return parent.children.get(node.key.child_key(self._sizes.page)) is node

    def split(self, child: Any, upper: Any) -> None:
        """`upper` is the new parent of `child` and has the first of its tokens."""
        self.tree.split(child.id, upper.id, len(upper.key))
        self.ssd.split(child.id, upper.id, len(upper.key))
        self._where[upper.id] = self._where[child.id] & _KV
        if child.id in self._since:
            self._since[upper.id] = self._since[child.id]
        self.sync(upper)
        self.sync(child)
        self._clean.changed(upper.id)
        self._clean.changed(child.id)

    def removed(self, node: Any) -> None:
        """`node` is no longer in the tree: no tier has its KV, so its checkpoints are of no use."""
        self._where.pop(node.id)
        self._clean.removed(node.id)
        since = self._since.pop(node.id, None)
        if since is not None:
            self.residence.kv.evicted(since, self.clock)
        self.tree.remove(node.id)
        for name in self.ssd.removed(node.id):
            if self._store is not None:
                self._store.drop(name.hash, DropReason.ORPHANED, kind=name.kind)

    # What the cache reports.

    def admitted(self, node: Any) -> None:
        """A request is admitted, which is one tick of the clock, and resumes at the end of `node` (the root: nowhere)."""
        self.clock += 1
        if node.parent is None:
            self.scarcity.requested(None)
        else:
            self.scarcity.requested(self.clock - self.tree.last_used(node.id, len(node.key)))
            self.tree.observe_hit(node.id, len(node.key))
        self.used(node)

    def used(self, node: Any) -> None:
        """A running request needs everything up to the end of `node`, which it may just have added."""
        offset = len(node.key) if node.parent is not None else 0
        self.tree.touch(node.id, offset, self.clock)

    def placed(self, key: bytes, node: Any, offset: int, stored: bool) -> None:
        """The SSD checkpoint `key` belongs `offset` tokens into `node`; `stored`: the SSD has it already."""
        self.ssd.place_checkpoint(key, node.id, offset, stored)

    def has_place(self, key: bytes) -> bool:
        """Return whether the SSD checkpoint `key` has a place in the tree, be it another request's."""
        return self.ssd.marks.find(key) is not None

    # What the store reports and asks. Only the mirror changes, never the store.

    def store_hooks(self) -> dict[str, Any]:
        """Return what a store is opened with, so that this ranking hears of it and chooses for it."""
        return {
            "choose_victim": self._ssd_victim,
            "on_present": lambda key, kind: self._present(Key(key, kind)),
            "on_gone": lambda key, kind, reason: self._gone(Key(key, kind), reason),
        }

    def _present(self, name: Key) -> None:
        self.ssd.stored(name, self.clock)
        if name.kind is RecordKind.CHECKPOINT:
            self.absences.stored(name.hash)

    def _gone(self, name: Key, reason: DropReason) -> None:
        self.ssd.gone(name, reason is DropReason.EVICTED, self.clock)
        if name.kind is RecordKind.CHECKPOINT:
            self.absences.dropped(name.hash, reason)

    def connect(self, store: CheckpointStore) -> None:
        """`store` was opened with the hooks: it is asked what may go, and told what lost its place in the tree.

        What it found when it was opened has no place in the tree until a request comes with the tokens.
        """
        self._store = store
        self.ssd.recover(store.entries())

    def _ssd_victim(self) -> Key | None:
        assert self._store is not None
        found = self.ssd.victim(self._may_go, lambda unit: self.evicted(unit, Tier.SSD))
        if found is None:
            return None
        name, unit = found
        if unit is not None:
            self.evicted(unit, Tier.SSD)
        return name

    def _may_go(self, name: Key) -> bool:
        assert self._store is not None
        return name not in self.kept and self._store.replaceable(name)

    # Pressure.

    def pressure(self) -> float:
        """Return how long KV stays in the cache over how long checkpoints stay on the SSD."""
        return self.residence.pressure(self.clock, *self._oldest())

    def _oldest(self) -> tuple[int | None, int | None]:
        """Return since when the oldest KV of the cache and the oldest checkpoint of the SSD are there, None for none."""
        return next(iter(self._since.values()), None), self.ssd.oldest_checkpoint

    def shown_pressure(self) -> float:
        """Return the same for people to see. The policy log has what was decided by, however often somebody looks."""
        return Residence.pressure(self.residence, self.clock, *self._oldest())

    def checkpoint_price(self) -> float:
        """Return the tokens that a checkpoint on the SSD has to save to be worth its place there."""
        assert self._store is not None
        return self.scarcity.checkpoint(
            Tier.SSD, self._sizes.slab, self._store.fill, self._store.admission.budget.scarcity
        )

    def hits_inside(self, start: int, end: int) -> float:
        """Return how many requests to come are expected to hit inside a segment of tokens `start` to `end`."""
        return self.scarcity.inside(start, end, self.end_share())

    def parted(self, node: Any, position: int) -> int | None:
        """See `PrefixTree.parted`."""
        return self.tree.parted(node, position)

    def end_share(self) -> float:
        """Return q, the share of hits at the end of a trajectory."""
        return float(self.tree.end_share.value)

    def residences(self) -> tuple[float | None, float | None]:
        """Return how long KV and checkpoints stay, in requests, None while nothing is known."""
        kv, state = self._oldest()
        return self.residence.kv.mean(self.clock, kv), self.residence.state.mean(self.clock, state)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the status. Times are requests."""
        kv_stays, state_stays = self.residences()
        return {
            "mode": self._mode.value,
            "tau_requests": self._tau,
            "clock_requests": self.clock,
            "kv_residence_requests": kv_stays,
            "state_residence_requests": state_stays,
            "pressure": self.shown_pressure(),
            "end_hit_share": self.tree.end_share.value,
            "capture_price_tokens": None if self._store is None else self.checkpoint_price(),
            "returns": {str(age): self.scarcity.returns.probability(age) for age in (0, 16, 64, 256, 1024)},
            "evictions_total": dict(self.evictions),
            "evictions_by_reason_total": {reason.value: count for reason, count in self.fates.items()},
            "victims_digest": self.digest,
        }

    def evicted(self, unit: Unit, tier: Tier) -> None:
        """Count an eviction by tier and kind, and by what it means. Call it before anything goes."""
        self.evictions[f"{tier.name.lower()}_{unit.kind.value}"] += 1
        age = max(self.clock - unit.last_access, 0)  # a client may have asked to keep it for longer
        self.scarcity.evicted(tier, unit.cost_tokens, unit.bytes, age, read_back=tier is not Tier.SSD)
        self.fates[place(unit.kind, tier, unit.checkpoint is not None, self._copies(unit)).reason] += 1
        victim = f"{self.digest} {int(tier)} {unit.checkpoint} {unit.nodes}"
        self.digest = crc32(victim.encode())

    def _copies(self, unit: Unit) -> Copies:
        """Return which tiers have all of a unit; a state that the SSD has counts as one that the host has."""
        if unit.checkpoint is None:
            return NO_COPIES
        states = {tier for tier in Tier if self.has_checkpoint(unit.checkpoint, tier)}
        if unit.kind is Kind.INTERMEDIATE:
            return Copies(Tier.DEVICE in states, Tier.HOST in states, Tier.SSD in states)
        kv = {tier for tier in Tier if all(self.tree.has_kv(node, tier) for node in unit.nodes)}
        return Copies(
            device=Tier.DEVICE in kv & states,
            host=Tier.HOST in kv and bool(states & {Tier.HOST, Tier.SSD}),
            ssd=Tier.SSD in kv & states,
        )

    def check(self, root: Any) -> None:
        """Assert that the mirror is the tree below `root`. For tests."""
        nodes = list(root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        assert {node.id for node in nodes} == set(self._where) - {self.tree.root}
        clean: dict[Any, int] = {}
        for node in reversed(nodes):
            assert self.tree.parent(node.id) == node.parent.id and self.tree.tokens(node.id) == len(node.key)
            full, state = node.component_data[ComponentType.FULL], node.component_data[ComponentType.MAMBA]
            assert self.tree.has_kv(node.id, Tier.DEVICE) == (full.value is not None)
            assert self.tree.has_kv(node.id, Tier.HOST) == (full.host_value is not None)
            at_end = dict(self.tree.checkpoints(node.id)).get(len(node.key), ())
            assert (Tier.DEVICE in at_end) == (state.value is not None)
            assert (Tier.HOST in at_end) == (state.host_value is not None)
            on_ssd = self.ssd.extents.covered(node.id, len(node.key) // self._sizes.page)
            assert self.tree.has_kv(node.id, Tier.SSD) == on_ssd
            held = on_ssd or full.value is not None or full.host_value is not None
            assert held or node.id in self.ssd.incomplete, f"node {node.id} is nowhere"
            if on_ssd and full.host_value is not None and full.value is None:
                below = [child.id for child in node.children.values()]
                if all(child in clean or not self._where[child] & _KV for child in below):
                    clean[node.id] = len(node.key)
        assert self._clean.by_node() == clean and self._clean.tokens == sum(clean.values())


def attach_ranking(
    cache: Any,
    *,
    sizes: Sizes,
    mode: Eviction,
    tau: float,
    one_device_pool: bool = False,
    journal: Journal | None = None,
) -> Ranking:
    """Give an empty cache its ranking: the tree core reports to it, the components ask it."""
    core = cache.tree_core
    ranking = Ranking(
        core.root_node.id,
        sizes=sizes,
        mode=mode,
        tau=tau,
        one_device_pool=one_device_pool,
        journal=journal,
    )
    core.ranking = ranking
    for component in cache.components.values():
        component.ranking = ranking
    return ranking
