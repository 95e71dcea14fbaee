"""Three tiers without a server: which pages and checkpoints a ranking keeps, request by request.

Drives `sglang_histate.policy` (tree, queues, intervals, residence) as the adapter does, and does the copying
that SGLang and the store do, as far as it decides what is cached:

- A request resumes at the deepest checkpoint, of any tier, below which device or host has all KV. The KV and
  that checkpoint come to the device; the rest of the prompt is computed.
- Its last whole page gets a checkpoint on the device and on the SSD, the positions of the interval policy get
  one on the SSD, and so does the place where its KV, but no checkpoint, went on.
- KV is copied to the host at once (write-through). What the device evicts stays there; what the host evicts is
  gone, with its checkpoints on the SSD. The host evicts nothing that the device has.
- The host keeps no states: they only pass through.
- An answer that completes a page adds one that no prompt has, with a checkpoint at its end on device and SSD.

No time passes but the policy's clock, one tick a request; requests do not overlap and every write has ended
before the next one. One node of the tree is one page. Nothing is random: equal requests, equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eval.eviction.budgets import Budgets, Units
from eval.eviction.requests import PAGE, Request
from sglang_histate.policy.capture_plan import plan_positions
from sglang_histate.policy.interval import IntervalPolicy, parse_interval
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import Residence
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit


@dataclass(frozen=True)
class Outcome:
    """Of one request, in tokens. `with_kv`: computed although their KV was there, for want of a checkpoint."""

    prompt: int
    cached: int
    with_kv: int


@dataclass
class Tiers:
    """What is used, in pages and states."""

    device_pages: int = 0
    device_states: int = 0
    host_pages: int = 0
    ssd_states: int = 0


@dataclass
class Simulation:
    """One run. `peak` has the largest use of each tier so far."""

    budgets: Budgets
    units: Units
    mode: Eviction
    tau: float
    interval: IntervalPolicy = field(default_factory=lambda: parse_interval("adaptive"))

    def __post_init__(self) -> None:
        kv, state = self.units.kv_token, self.units.checkpoint
        self.tree = PrefixTree()
        self.residence = Residence()
        self.used, self.peak = Tiers(), Tiers()
        self.evictions = {f"{tier.name.lower()}_{kind.value}": 0 for tier in Tier for kind in Kind}
        self.now = 0
        self._since: dict[int, int] = {}  # page -> when its KV came
        self._ssd_since: dict[int, int] = {}
        one = self.budgets.one_device_pool
        self._device_kv = self._queue(Pool(Tier.DEVICE, state if one else 0, kv))
        self._device_states = self._device_kv if one else self._queue(Pool(Tier.DEVICE, state, 0))
        self._host = self._queue(Pool(Tier.HOST, 0, kv))
        self._ssd = self._queue(Pool(Tier.SSD, state, 0))
        arena = self.budgets.host_bytes - self.budgets.inflight_bytes
        self._limit = Tiers(
            self.budgets.device_kv_tokens // PAGE,
            self.budgets.device_states,
            arena // (kv * PAGE),
            self.budgets.ssd_bytes // self.units.slab - 1,  # the header takes one
        )
        self._locked: frozenset[int] = frozenset()  # pages of the request being served
        self._busy: frozenset[int] = frozenset()  # pages whose states it needs
        self._answers = 0  # names of pages that end in an answer are negative

    def _queue(self, pool: Pool) -> EvictionQueue:
        return EvictionQueue(self.tree, pool, self.units.kv_token, self.tau, self.mode)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        return [self.serve(request) for request in requests]

    def serve(self, request: Request) -> Outcome:
        """Serve one request and leave everything as it is when its writes have ended.

        Raises:
            ValueError: the prompt alone does not fit the device.
        """
        pages, total = request.pages, len(request.tokens)
        if len(pages) > self._limit.device_pages:
            raise ValueError(
                f"a prompt of {total} tokens does not fit a device of {self.budgets.device_kv_tokens}"
            )
        covered, resumed = self._match(pages, (total - 1) // PAGE)
        self._locked = frozenset(pages)
        self._busy = frozenset((*pages[-1:], *pages[resumed - 1 : resumed]))
        self.now += 1
        node = pages[resumed - 1] if resumed else self.tree.root
        if resumed:
            self.tree.observe_hit(node, PAGE)
        self.tree.touch(node, PAGE if resumed else 0, self.now)
        if resumed:
            self._place_state(node)
        for index, page in enumerate(pages):
            self._place_kv(page, pages[index - 1] if index else self.tree.root)
        if pages:
            self.tree.touch(pages[-1], PAGE, self.now)
        for position in self._captures(resumed * PAGE, total, covered * PAGE):
            self._store(pages[position // PAGE - 1])
        if pages:
            self._place_state(pages[-1])
        self._back_up(pages)
        self._finish(request)
        self._locked = self._busy = frozenset()
        with_kv = max(min(covered, (total - 1) // PAGE) - resumed, 0) * PAGE
        return Outcome(total, resumed * PAGE, with_kv)

    def _finish(self, request: Request) -> None:
        """Cache the answer where it completes a page: one more page, with the checkpoint at its end."""
        pages = request.pages
        cached = len(request.tokens) + request.output_tokens - 1  # the last token is never computed
        if cached // PAGE == len(pages):
            return
        self._answers -= 1
        page = self._answers
        self._locked, self._busy = frozenset((*pages, page)), frozenset((page,))
        self._place_kv(page, pages[-1] if pages else self.tree.root)
        self.tree.touch(page, PAGE, self.now)
        self._place_state(page)
        self._store(page)
        self._back_up([page])

    def _match(self, pages: Sequence[int], most: int) -> tuple[int, int]:
        """Return how many pages have KV, and how many of them, at most `most`, the deepest checkpoint has read."""
        covered = resumed = 0
        for index, page in enumerate(pages, 1):
            if page not in self.tree:
                break
            if not (self.tree.has_kv(page, Tier.DEVICE) or self.tree.has_kv(page, Tier.HOST)):
                break
            covered = index
            if index <= most and self.tree.checkpoints(page):
                resumed = index
        return covered, resumed

    def _captures(self, start: int, total: int, covered: int) -> list[int]:
        """Return the positions that the server's capture plan would take, ascending."""
        oldest_kv = next(iter(self._since.values()), None)
        oldest_state = next(iter(self._ssd_since.values()), None)
        pressure = self.residence.pressure(self.now, oldest_kv, oldest_state)
        state_tokens = self.units.checkpoint / self.units.kv_token
        interval = self.interval.choose(total - start, state_tokens, pressure)
        positions = set(plan_positions(start, total, interval, PAGE))
        positions |= {total // PAGE * PAGE, (total - 1) // PAGE * PAGE, covered}
        return sorted(position for position in positions if start < position <= total)

    # What comes to a tier.

    def _place_kv(self, page: int, parent: int) -> None:
        if page not in self.tree:
            self.tree.add(page, parent, PAGE)
            self._since[page] = self.now
        if not self.tree.has_kv(page, Tier.DEVICE):
            while not self._device_takes(pages=1):
                if not self._free_on_device(self._device_kv):
                    raise AssertionError("a prompt that fits finds room")
            self.tree.set_kv(page, Tier.DEVICE, True)
            self._use("device_pages", 1)

    def _place_state(self, page: int) -> None:
        if self._has_state(page, Tier.DEVICE):
            return
        while not self._device_takes(states=1):
            if not self._free_on_device(self._device_states):
                return
        self.tree.set_checkpoint(page, PAGE, Tier.DEVICE, True)
        self._use("device_states", 1)

    def _store(self, page: int) -> None:
        if self._has_state(page, Tier.SSD):
            return
        while self.used.ssd_states >= self._limit.ssd_states:
            if not self._free_on_ssd():
                return
        self.tree.set_checkpoint(page, PAGE, Tier.SSD, True)
        self._ssd_since[page] = self.now
        self._use("ssd_states", 1)

    def _back_up(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self.tree.has_kv(page, Tier.HOST):
                continue
            while self.used.host_pages >= self._limit.host_pages:
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
        if self.budgets.one_device_pool:
            return self._device_bytes(pages, states) <= self._device_bytes(
                self._limit.device_pages, self._limit.device_states
            )
        return pages <= self._limit.device_pages and states <= self._limit.device_states

    def _device_bytes(self, pages: int, states: int) -> int:
        return pages * PAGE * self.units.kv_token + states * self.units.checkpoint

    def _free_on_device(self, queue: EvictionQueue) -> bool:
        """Evict from the pool that is short; False if all of it is in use.

        A state goes without its KV if it is an intermediate one, or if the pool has no KV.
        """

        def by_state(unit: Unit) -> bool:
            return unit.kind is Kind.INTERMEDIATE or not queue.pool.kv_token_bytes

        def usable(unit: Unit) -> bool:
            if by_state(unit):
                return self._state_page(unit) not in self._busy
            return unit.nodes[0] not in self._locked

        unit = self._victim(queue, usable)
        if unit is None:
            return False
        if by_state(unit):
            self._drop_state(self._state_page(unit), Tier.DEVICE)
            return True
        for page in unit.nodes:
            if page in self._locked:
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
        return not on_device and page not in self._locked and not self.tree.children(page)

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
