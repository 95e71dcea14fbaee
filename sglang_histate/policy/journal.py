"""A record of everything the policy was told and what it answered, from which `eval.journal` gets the same answers.

Each event is a list of JSON values, its name first. A `Journal` gives out the policy's objects; they do what they
always do and report it through `emit`, in the order in which it happens.

    choices   the supported intervals
    reset     root, tau, mode, KV bytes per token                      an empty tree; the queues follow
    pool      name, tier, bytes per state, bytes per token of KV       a queue for that pool, over the tree
    add, split, remove, kv, checkpoint, touch, hit, keep, forsake      arguments of `PrefixTree`
    left      "kv" or "state", entered, now                            arguments of `ResidenceTime.evicted`
    pressure  now, oldest KV, oldest state, answer
    interval  tokens, state in tokens of KV, pressure, answer
    segment, parted                                                    arguments of `HitPrior`, in pages
    seen, left at                                                      arguments of `PlacePrior.seen` and `parted`
    plan      start, end, price, given pages, (page, kind of place), answer    of `plan_segment`, in pages
    tier      host, ssd, worth, is end, refused, answer or null               of `historical_tier`
    victim    pool, the units that could not go, answer or null        a unit is its kind, checkpoint and nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_histate.policy.hit_prior import HitPrior
from sglang_histate.policy.interval import IntervalPolicy
from sglang_histate.policy.place_prior import PlaceKind, PlacePrior
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence, ResidenceTime
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool, Unit

Event = list[Any]
Emit = Callable[[Event], None]


def written(unit: Unit | None) -> list[Any] | None:
    """Return what says which unit it is."""
    if unit is None:
        return None
    place = None if unit.checkpoint is None else list(unit.checkpoint)
    return [unit.kind.value, place, list(unit.nodes)]


class Journal:
    """Gives out reporting objects for one rank. `emit` is called once per event, on the caller's thread."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def tree(self, root: int, tau: float, mode: Eviction, kv_token_bytes: int) -> PrefixTree:
        """Return an empty tree; what was reported before has no part in it."""
        self.emit(["reset", root, tau, mode.value, kv_token_bytes])
        return _Tree(root, self.emit)

    def queue(
        self, name: str, tree: PrefixTree, pool: Pool, kv_token_bytes: int, tau: float, mode: Eviction
    ) -> EvictionQueue:
        """Return a queue over a tree of this journal. `name` tells pools of one tier apart."""
        self.emit(["pool", name, int(pool.tier), pool.state_bytes, pool.kv_token_bytes])
        return _Queue(name, self.emit, tree, pool, kv_token_bytes, tau, mode)

    def residence(self) -> Residence:
        """Return times that know nothing yet. They outlive a reset."""
        return _Residence(self.emit)

    def choices(self, policy: IntervalPolicy) -> None:
        """Report what intervals are chosen from."""
        self.emit(["choices", list(policy.supported)])

    def interval(self, tokens: int, state_tokens: float, pressure: float, chosen: int) -> None:
        """Report an interval that was chosen."""
        self.emit(["interval", tokens, state_tokens, pressure, chosen])

    def hit_prior(self) -> HitPrior:
        """Return a prior that knows nothing yet. It outlives a reset."""
        return _HitPrior(self.emit)

    def place_prior(self) -> PlacePrior:
        """Return rates of places that know nothing yet. They outlive a reset."""
        return _PlacePrior(self.emit)

    def plan(
        self,
        start: int,
        end: int,
        price: float,
        given: Sequence[int],
        places: Sequence[tuple[int, PlaceKind]],
        chosen: Sequence[int],
    ) -> None:
        """Report the learned plan of a segment."""
        named = [[page, kind.value] for page, kind in places]
        self.emit(["plan", start, end, price, list(given), named, list(chosen)])

    def tier(
        self, host: float, ssd: float, worth: float, is_end: bool, refused: bool, chosen: Tier | None
    ) -> None:
        """Report the tier that was chosen for a historical checkpoint."""
        answer = None if chosen is None else int(chosen)
        self.emit(["tier", host, ssd, worth, is_end, refused, answer])


class _Tree(PrefixTree):
    def __init__(self, root: int, emit: Emit) -> None:
        super().__init__(root)
        self._emit = emit

    def add(self, node: int, parent: int, tokens: int) -> None:
        super().add(node, parent, tokens)
        self._emit(["add", node, parent, tokens])

    def split(self, node: int, upper: int, tokens: int) -> None:
        super().split(node, upper, tokens)
        self._emit(["split", node, upper, tokens])

    def remove(self, node: int) -> None:
        emit = self._emit
        self._emit = lambda event: None  # removing takes the node's KV away itself
        try:
            super().remove(node)
        finally:
            self._emit = emit
        emit(["remove", node])

    def set_kv(self, node: int, tier: Tier, present: bool) -> None:
        super().set_kv(node, tier, present)
        self._emit(["kv", node, int(tier), present])

    def set_checkpoint(self, node: int, offset: int, tier: Tier, present: bool) -> None:
        super().set_checkpoint(node, offset, tier, present)
        self._emit(["checkpoint", node, offset, int(tier), present])

    def touch(self, node: int, offset: int, now: int) -> None:
        super().touch(node, offset, now)
        self._emit(["touch", node, offset, now])

    def observe_hit(self, node: int, offset: int) -> None:
        super().observe_hit(node, offset)
        self._emit(["hit", node, offset])

    def keep(self, node: int, offset: int, until: int) -> None:
        super().keep(node, offset, until)
        self._emit(["keep", node, offset, until])

    def forsake(self, node: int, start: int = 0) -> None:
        super().forsake(node, start)
        self._emit(["forsake", node, start])


class _Queue(EvictionQueue):
    def __init__(
        self,
        name: str,
        emit: Emit,
        tree: PrefixTree,
        pool: Pool,
        kv_token_bytes: int,
        tau: float,
        mode: Eviction,
    ) -> None:
        super().__init__(tree, pool, kv_token_bytes, tau, mode)
        self._name = name
        self._emit = emit

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        refused: list[Any] = []

        def noted(unit: Unit) -> bool:
            good = usable(unit)
            if not good:
                refused.append(written(unit))
            return good

        found = super().victim(noted)
        self._emit(["victim", self._name, refused, written(found)])
        return found


class _Time(ResidenceTime):
    __slots__ = ("_emit", "_kind")

    def __init__(self, kind: str, emit: Emit) -> None:
        super().__init__()
        self._kind = kind
        self._emit = emit

    def evicted(self, entered: int, now: int) -> None:
        super().evicted(entered, now)
        self._emit(["left", self._kind, entered, now])


class _Residence(Residence):
    __slots__ = ("_emit",)

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self.kv, self.state = _Time("kv", emit), _Time("state", emit)
        self._emit = emit

    def pressure(self, now: int, oldest_kv: int | None, oldest_state: int | None) -> float:
        answer = super().pressure(now, oldest_kv, oldest_state)
        self._emit(["pressure", now, oldest_kv, oldest_state, answer])
        return answer


class _HitPrior(HitPrior):
    __slots__ = ("_emit",)

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit

    def segment(self, start: int, end: int) -> None:
        super().segment(start, end)
        self._emit(["segment", start, end])

    def parted(self, at: int, end: int) -> None:
        super().parted(at, end)
        self._emit(["parted", at, end])


class _PlacePrior(PlacePrior):
    __slots__ = ("_emit",)

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit

    def seen(self, kind: PlaceKind) -> None:
        super().seen(kind)
        self._emit(["seen", kind.value])

    def parted(self, kind: PlaceKind, share: float = 1.0) -> None:
        super().parted(kind, share)
        self._emit(["left at", kind.value, share])
