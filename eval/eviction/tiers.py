"""Device, host and SSD as sets of pages and checkpoints with budgets; the policy's queues say what goes.

Keeps the policy's tree up to date as the adapter does. One node of the tree is one page, named by the caller.
Budgets are hard: room is made before anything comes. No state is ever on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.eviction.budgets import Budgets, Units
from eval.eviction.requests import PAGE
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit


@dataclass
class Use:
    """What is in each tier, in pages and states."""

    device_pages: int = 0
    device_states: int = 0
    host_pages: int = 0
    ssd_states: int = 0


class Tiers:
    """What is where. `peak` has the largest use of each tier so far, `now` is the policy's clock.

    `locked` are pages that may not go, `busy` those whose states may not go from the device.
    """

    def __init__(self, budgets: Budgets, units: Units, mode: Eviction, tau: float) -> None:
        kv, state = units.kv_token, units.checkpoint
        self.tree = PrefixTree()
        self.residence = Residence()
        self.used, self.peak = Use(), Use()
        self.limit = Use(
            budgets.device_kv_tokens // PAGE,
            budgets.device_states,
            (budgets.host_bytes - budgets.inflight_bytes) // (kv * PAGE),
            budgets.ssd_bytes // units.slab - 1,  # the header takes one
        )
        self.evictions = {f"{tier.name.lower()}_{kind.value}": 0 for tier in Tier for kind in Kind}
        self.now = 0
        self.locked: frozenset[int] = frozenset()
        self.busy: frozenset[int] = frozenset()
        self._units = units
        self._one_pool = one = budgets.one_device_pool
        self._since: dict[int, int] = {}  # page -> when its KV came
        self._ssd_since: dict[int, int] = {}

        def queue(pool: Pool) -> EvictionQueue:
            return EvictionQueue(self.tree, pool, kv, tau, mode)

        self._device_kv = queue(Pool(Tier.DEVICE, state if one else 0, kv))
        self._device_states = self._device_kv if one else queue(Pool(Tier.DEVICE, state, 0))
        self._host = queue(Pool(Tier.HOST, 0, kv))
        self._ssd = queue(Pool(Tier.SSD, state, 0))

    def has_kv(self, page: int) -> bool:
        """Whether device or host have the page's KV."""
        return page in self.tree and (
            self.tree.has_kv(page, Tier.DEVICE) or self.tree.has_kv(page, Tier.HOST)
        )

    def pressure(self) -> float:
        """T_KV / T_state."""
        oldest_kv = next(iter(self._since.values()), None)
        oldest_state = next(iter(self._ssd_since.values()), None)
        return self.residence.pressure(self.now, oldest_kv, oldest_state)

    # What comes to a tier.

    def place_kv(self, page: int, parent: int) -> None:
        """Have the page's KV on the device; a new page comes below `parent`."""
        if page not in self.tree:
            self.tree.add(page, parent, PAGE)
            self._since[page] = self.now
        if not self.tree.has_kv(page, Tier.DEVICE):
            while not self._device_takes(pages=1):
                if not self._free_on_device(self._device_kv):
                    raise AssertionError("a prompt that fits finds room")
            self.tree.set_kv(page, Tier.DEVICE, True)
            self._use("device_pages", 1)

    def place_state(self, page: int) -> None:
        """Have the state at the page's end on the device, if there is room."""
        if self._has_state(page, Tier.DEVICE):
            return
        while not self._device_takes(states=1):
            if not self._free_on_device(self._device_states):
                return
        self.tree.set_checkpoint(page, PAGE, Tier.DEVICE, True)
        self._use("device_states", 1)

    def store(self, page: int) -> None:
        """Have the state at the page's end on the SSD."""
        if self._has_state(page, Tier.SSD):
            return
        while self.used.ssd_states >= self.limit.ssd_states:
            if not self._free_on_ssd():
                return
        self.tree.set_checkpoint(page, PAGE, Tier.SSD, True)
        self._ssd_since[page] = self.now
        self._use("ssd_states", 1)

    def back_up(self, pages: Sequence[int]) -> None:
        """Copy the KV of a path to the host, until no more can go from there."""
        for page in pages:
            if self.tree.has_kv(page, Tier.HOST):
                continue
            while self.used.host_pages >= self.limit.host_pages:
                if not self._free_host_page():
                    return
            self.tree.set_kv(page, Tier.HOST, True)
            self._use("host_pages", 1)

    def _use(self, name: str, change: int) -> None:
        now = getattr(self.used, name) + change
        setattr(self.used, name, now)
        setattr(self.peak, name, max(getattr(self.peak, name), now))

    # What goes.

    def _victim(self, queue: EvictionQueue, usable: Callable[[Unit], bool]) -> Unit | None:
        unit = queue.victim(usable)
        if unit is not None:
            self.evictions[f"{unit.tier.name.lower()}_{unit.kind.value}"] += 1
        return unit

    def _device_takes(self, pages: int = 0, states: int = 0) -> bool:
        """Whether so much more fits on the device as it is."""
        pages += self.used.device_pages
        states += self.used.device_states
        if self._one_pool:
            return self._device_bytes(pages, states) <= self._device_bytes(
                self.limit.device_pages, self.limit.device_states
            )
        return pages <= self.limit.device_pages and states <= self.limit.device_states

    def _device_bytes(self, pages: int, states: int) -> int:
        return pages * PAGE * self._units.kv_token + states * self._units.checkpoint

    def _free_on_device(self, queue: EvictionQueue) -> bool:
        """Evict from the pool that is short; False if all of it is in use.

        A state goes without its KV if it is an intermediate one, or if the pool has no KV.
        """

        def by_state(unit: Unit) -> bool:
            return unit.kind is Kind.INTERMEDIATE or not queue.pool.kv_token_bytes

        def usable(unit: Unit) -> bool:
            if by_state(unit):
                return self._state_page(unit) not in self.busy
            return unit.nodes[0] not in self.locked

        unit = self._victim(queue, usable)
        if unit is None:
            return False
        if by_state(unit):
            self._drop_state(self._state_page(unit), Tier.DEVICE)
            return True
        for page in unit.nodes:
            if page in self.locked:
                break
            self.tree.set_kv(page, Tier.DEVICE, False)
            self._use("device_pages", -1)
            self._drop_state(page, Tier.DEVICE)
            if not self.tree.has_kv(page, Tier.HOST):
                self._forget(page)
        return True

    def _free_host_page(self) -> bool:
        """Evict a bundle from the host, which is the end of it; False if nothing may go."""
        unit = self._victim(self._host, lambda unit: self._host_only(unit.nodes[0]))
        if unit is None:
            return False
        for page in unit.nodes:
            if not self._host_only(page):
                break
            self.tree.set_kv(page, Tier.HOST, False)
            self._use("host_pages", -1)
            self._forget(page)
        return True

    def _host_only(self, page: int) -> bool:
        on_device = self.tree.has_kv(page, Tier.DEVICE)
        return not on_device and page not in self.locked and not self.tree.children(page)

    def _free_on_ssd(self) -> bool:
        """Evict one checkpoint from the SSD; False if there is none."""
        unit = self._victim(self._ssd, lambda unit: True)
        if unit is None:
            return False
        page = self._state_page(unit)
        self.residence.state.evicted(self._ssd_since[page], self.now)
        self._drop_state(page, Tier.SSD)
        return True

    @staticmethod
    def _state_page(unit: Unit) -> int:
        assert unit.checkpoint is not None
        return unit.checkpoint[0]

    def _has_state(self, page: int, tier: Tier) -> bool:
        return any(tier in tiers for _, tiers in self.tree.checkpoints(page))

    def _drop_state(self, page: int, tier: Tier) -> None:
        if self._has_state(page, tier):
            self.tree.set_checkpoint(page, PAGE, tier, False)
            self._use("device_states" if tier is Tier.DEVICE else "ssd_states", -1)
            if tier is Tier.SSD:
                del self._ssd_since[page]

    def _forget(self, page: int) -> None:
        """No tier has the page's KV any more: its checkpoints are of no use."""
        for tier in (Tier.DEVICE, Tier.SSD):
            self._drop_state(page, tier)
        self.tree.remove(page)
        self.residence.kv.evicted(self._since.pop(page), self.now)
