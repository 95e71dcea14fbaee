"""What every tier holds: KV of runs and checkpoints on them, with hard budgets, mirrored in the policy's tree.

One radix tree for all tiers. A run has KV in a tier or not, as a whole; a checkpoint sits after some page of a
run. A run whose KV is in no tier is gone, and so is all below it and every checkpoint there: nothing is kept that
cannot be restored. Decides nothing: who goes and what is written where is `tiered`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eval.simulate.budgets import Space
from eval.simulate.costs import PAGE_TOKENS, Costs
from eval.simulate.extents import Extents, Part
from eval.simulate.radix import RadixTree, Run, State, Step
from sglang_histate.policy.prefix_nodes import CACHED, TIERS, Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.residence import Residence

Place = tuple[Run, int]
"""A position on the path to a run: pages from the root. It stays right when runs on the path are split, which leaves a
run's end where it was."""


class Contents(RadixTree):
    """Spaces are given by tier, one for KV and one for states; both may be the same.

    `records`: KV lies on the SSD in records that take as much as a checkpoint there however full they are; else it takes there what
    it has.
    """

    def __init__(self, costs: Costs, kv: list[Space], states: list[Space], records: bool = False) -> None:
        super().__init__()
        self.tree = PrefixTree(self.root.id)
        self.runs: dict[int, Run] = {self.root.id: self.root}
        self.kv_space = kv
        self.state_space = states
        self.residence = Residence()
        self.clock = 0
        self.page_bytes = costs.page_bytes
        self.state_bytes, self.ssd_state_bytes = costs.state_bytes, costs.ssd_state_bytes
        self.extents = Extents(kv[Tier.SSD], self.page_bytes, self.ssd_state_bytes if records else 0)
        self.kv_changed: Callable[[Run], None] | None = None
        """Hears when a run's KV comes to a tier or leaves it, and of both parts of one that was split."""
        self._since: dict[int, int] = {}  # run -> when its KV came to device or host
        self._ssd_since: dict[State, int] = {}  # when the SSD got it, oldest first
        self.host_states: dict[State, int] = {}
        """Checkpoints on the host, and since which tick; oldest first."""

    # Reading.

    def covered(self, path: Iterable[Step], tiers: int) -> int:
        """Return how many pages of a match have KV in one of the tiers, given as bits, without a hole."""
        pages = 0
        for run, matched in path:
            if not run.kv & tiers:
                break
            pages += matched
        return pages

    def deepest_state(self, path: list[Step], most: int, tiers: int) -> tuple[Run, int] | None:
        """Return (run, pages of it) of the deepest checkpoint in one of the tiers within the first `most` pages."""
        for run, matched in reversed(path):
            within = min(matched, most - run.start)
            found = max(
                (at for at, state in run.states.items() if at <= within and state.tiers & tiers), default=0
            )
            if found:
                return run, found
        return None

    def pressure(self) -> float:
        """T_KV / T_state, as the server measures it."""
        oldest_kv = next(iter(self._since.values()), None)
        oldest_state = next(iter(self._ssd_since.values()), None)
        return self.residence.pressure(self.clock, oldest_kv, oldest_state)

    def kv_bytes(self, run: Run) -> int:
        """Bytes of a run's KV on device or host."""
        return len(run.pages) * self.page_bytes

    def state_size(self, tier: Tier) -> int:
        """Bytes of a checkpoint in a tier: the SSD may keep it in fewer."""
        return self.ssd_state_bytes if tier is Tier.SSD else self.state_bytes

    # Changes.

    def set_kv(self, run: Run, tier: Tier, present: bool) -> None:
        """Say whether a tier has a run's KV; room is the caller's to make. The last copy's end is `forget`'s."""
        bit = 1 << tier
        if bool(run.kv & bit) == present:
            return
        if tier is Tier.SSD and present:
            for part in self.extents.missing(run):
                self.extents.add((part,))
        elif tier is Tier.SSD:
            self.extents.drop(run)
        else:
            size = self.kv_bytes(run)
            space = self.kv_space[tier]
            pinned = size if tier is Tier.DEVICE and run.device_locks else 0
            if present:
                space.take(size)
                space.pin(pinned)
            else:
                space.pin(-pinned)
                space.take(-size)
        before = run.kv & CACHED
        run.kv ^= bit
        after = run.kv & CACHED
        if after and not before:
            self._since[run.id] = self.clock
        elif before and not after:
            self.residence.kv.evicted(self._since.pop(run.id), self.clock)
        self.tree.set_kv(run.id, tier, present)
        if self.kv_changed is not None:
            self.kv_changed(run)

    def add_record(self, parts: Sequence[Part]) -> None:
        """The SSD has pages of one path, the uppermost first, in a new record; room is the caller's to make."""
        self.extents.add(parts)
        for part in parts:
            if self.extents.covered(part.run):
                self.set_kv(part.run, Tier.SSD, True)

    def set_state(self, run: Run, page: int, tier: Tier, present: bool) -> None:
        """Say whether a tier has the checkpoint after `page` pages of a run; room is the caller's to make."""
        if self.has_state(run, page, tier) == present:
            return
        size = self.state_size(tier)
        self.state_space[tier].take(size if present else -size)
        state = run.states.get(page)
        if state is None:
            state = run.states[page] = State(run, page, self.clock)
        state.tiers ^= 1 << tier
        if not state.tiers:
            del run.states[page]
        if tier is not Tier.DEVICE:
            since = self._ssd_since if tier is Tier.SSD else self.host_states
            if present:
                since[state] = self.clock
            else:
                del since[state]
        self.tree.set_checkpoint(run.id, page * PAGE_TOKENS, tier, present)

    def state_evicted_from_ssd(self, run: Run, page: int) -> None:
        """Count how long the SSD had a checkpoint that is about to be pushed out."""
        self.residence.state.evicted(self._ssd_since[run.states[page]], self.clock)

    @staticmethod
    def locate(place: Place) -> tuple[Run, int]:
        """Return the run that a place is in now, and how many of its pages lie before the place."""
        run, at = place
        while at <= run.start:
            assert run.parent is not None
            run = run.parent
        return run, at - run.start

    def has_state(self, run: Run, page: int, tier: Tier) -> bool:
        state = run.states.get(page)
        return state is not None and bool(state.tiers >> tier & 1)

    def forget(self, run: Run) -> None:
        """Remove a run and all below it, with whatever any tier has of them. None may be locked by a request."""
        order = [run]
        for one in order:
            order.extend(one.children.values())
        for one in reversed(order):
            assert not one.device_locks
            for tier in TIERS:
                for page in [page for page, state in one.states.items() if state.tiers >> tier & 1]:
                    self.set_state(one, page, tier, False)
                self.set_kv(one, tier, False)
            self.remove(one)

    def lock(self, path: Iterable[Run]) -> None:
        """Keep runs on the device for one more request."""
        for run in path:
            run.device_locks += 1
            if run.device_locks == 1 and run.kv & 1 << Tier.DEVICE:
                self.kv_space[Tier.DEVICE].pin(self.kv_bytes(run))

    def unlock(self, path: Iterable[Run]) -> None:
        for run in path:
            run.device_locks -= 1
            if not run.device_locks and run.kv & 1 << Tier.DEVICE:
                self.kv_space[Tier.DEVICE].pin(-self.kv_bytes(run))

    def touch(self, run: Run, page: int) -> None:
        """The request of this tick uses everything up to `page` pages into a run."""
        if page in run.states:
            run.states[page].used = self.clock
        self.tree.touch(run.id, page * PAGE_TOKENS, self.clock)

    # The radix tree's own changes.

    def _added(self, run: Run) -> None:
        assert run.parent is not None
        self.runs[run.id] = run
        self.tree.add(run.id, run.parent.id, len(run.pages) * PAGE_TOKENS)

    def _split(self, run: Run, upper: Run) -> None:
        cut = len(upper.pages)
        self.runs[upper.id] = upper
        upper.kv, upper.device_locks, upper.host_locks = run.kv, run.device_locks, run.host_locks
        upper.states = {page: state for page, state in run.states.items() if page <= cut}
        run.states = {page - cut: state for page, state in run.states.items() if page > cut}
        for state in upper.states.values():
            state.run = upper
        for page, state in run.states.items():
            state.page = page
        if run.id in self._since:
            self._since[upper.id] = self._since[run.id]
        self.extents.split(run, upper)
        self.tree.split(run.id, upper.id, cut * PAGE_TOKENS)
        if self.kv_changed is not None:
            self.kv_changed(upper)
            self.kv_changed(run)
        for part in (upper, run):
            if part.extents and self.extents.covered(part):
                self.set_kv(part, Tier.SSD, True)

    def _removed(self, run: Run) -> None:
        self.extents.forget(run)
        del self.runs[run.id]
        self.tree.remove(run.id)
