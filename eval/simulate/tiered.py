"""A prefix cache over device, host and SSD: matching, reading, admission, publishing, eviction.

What all systems have in common. Subclasses say what is copied where and when: `_kept` for KV, `_captured` for
checkpoints, `_leaving` before something leaves a tier. The order of eviction and the placement of checkpoints
are given from outside.

A request resumes at the deepest checkpoint that KV before it can be had for. If the SSD has to bring either, it
waits until both are on the host (others run meanwhile). Then it is admitted when the device has room for all it will
ever need: there is no preemption. What it loads and computes goes into the tree as it comes, locked until it ends.
"""

from __future__ import annotations

from typing import Any

from eval.simulate.budgets import Budgets, Space
from eval.simulate.contents import Contents, Place
from eval.simulate.costs import PAGE_TOKENS, Costs
from eval.simulate.fault import ANY, Faults
from eval.simulate.jobs import Job, Pages
from eval.simulate.links import Links
from eval.simulate.orders import MakeOrder, Order
from eval.simulate.placement import Placement, Segment
from eval.simulate.prices import Prices
from eval.simulate.radix import Run
from eval.simulate.system import Admission, Schedule, Visit
from sglang_histate.policy.prefix_nodes import CACHED, TIERS, Tier
from sglang_histate.policy.units import Kind, Pool, Unit


class Tiered:
    """`halves`: device and host give one half to KV and one to states, else both share all of it."""

    extent_pages = 0
    """Pages of KV for which the SSD has records, each as large as a checkpoint; 0: KV takes there what it has."""
    host_overhead_bytes = 0
    """Of the host's budget, not for prefixes."""
    least_gain_pages = 1
    """Pages that reading from the SSD has to save."""
    read_deadline_s: float | None = None
    """How long a request waits for the SSD."""
    tail_tokens = 0
    host_drops_copies = True
    """Whether KV may leave the host while the device still has it."""

    def __init__(
        self,
        costs: Costs,
        budgets: Budgets,
        schedule: Schedule,
        *,
        placement: Placement,
        order: MakeOrder,
        halves: bool = False,
    ) -> None:
        self.costs = costs
        self.placement = placement
        self.chunk_tokens = placement.chunk_tokens
        self.links = Links.of(costs)
        self.schedule = schedule
        limits = (budgets.device_bytes, budgets.host_bytes - self.host_overhead_bytes, budgets.ssd_bytes)
        kv, states = [], []
        for tier, limit in zip(TIERS, limits, strict=True):
            name, split = tier.name.lower(), halves and tier is not Tier.SSD
            kv.append(Space(f"{name} KV" if split else name, max(limit, 0) // (2 if split else 1)))
            states.append(Space(f"{name} states", kv[tier].limit) if split else kv[tier])
        self.contents = Contents(costs, kv, states, bool(self.extent_pages))
        self.has_host, self.has_ssd = kv[Tier.HOST].limit > 0, kv[Tier.SSD].limit > 0
        self.kv_orders: list[Order] = []
        self.state_orders: list[Order] = []
        for tier in TIERS:
            self._make_orders(tier, order)
        self.prices = Prices(self.contents, self.has_ssd)
        self.faults = Faults(self)
        self.evictions = {f"{tier.name.lower()}_{kind.value}": 0 for tier in Tier for kind in Kind}
        self.now_s = 0.0

    def _make_orders(self, tier: Tier, order: MakeOrder) -> None:
        state, token = self.contents.state_size(tier), self.costs.kv_token_bytes
        if tier is Tier.SSD and self.extent_pages:
            token = -(-state // (self.extent_pages * PAGE_TOKENS))
        split = self.contents.kv_space[tier] is not self.contents.state_space[tier]
        self.kv_orders.append(order(self.contents, Pool(tier, 0 if split else state, token)))
        self.state_orders.append(
            order(self.contents, Pool(tier, state, 0)) if split else self.kv_orders[tier]
        )

    # What subclasses say.

    def _kept(self, runs: list[Run]) -> None:
        """The device has KV of these runs, from the top down, that it did not have before."""

    def _captured(self, places: list[Place], end: Place | None, answer: bool) -> None:
        """These checkpoints can be kept, ascending. `end`: the last one if it is the prompt's or the answer's end."""
        raise NotImplementedError

    def _chunk_ended(self, place: Place) -> None:
        """A chunk that does not end the prompt has ended here, and its state is at hand."""

    def _ended_in_its_page(self, place: Place) -> None:
        """An answer has ended that completes no page: the prompt's end is the last that there is."""

    def _leaving(self, tier: Tier, kind: Kind, place: Place | None, runs: list[Run]) -> None:
        """A unit is about to leave a tier: the checkpoint at `place`, if any, and the KV of `runs`, the deepest first."""

    def _loaded(self, place: Place) -> None:
        """The checkpoint has been copied from the host to the device."""

    # The life of a request, see `system.System`.

    def arrive(self, job: Job, now_s: float) -> Visit:
        self.now_s = now_s
        visit = Visit(job)
        if self.has_ssd and self.has_host:
            self.faults.look(visit)
        return visit

    def ready(self, visit: Visit, now_s: float) -> bool:
        self.now_s = now_s
        if visit.waits is None and visit.holds is None and self.has_ssd and self.has_host:
            self.faults.look(visit)
        return visit.waits is None

    def admit(self, visit: Visit, now_s: float) -> Admission | None:
        self.now_s = now_s
        job, contents = visit.job, self.contents
        path = contents.match(job.prompt)
        near, reach = contents.covered(path, CACHED), contents.covered(path, ANY)
        last = path[-1] if path else None
        parted = (
            (last.run.start + last.pages, last.run.end) if last and last.pages < len(last.run.pages) else None
        )
        found = contents.deepest_state(path, min(near, job.most_restored), CACHED)
        run = contents.root
        if found is not None:
            run, at = found
            if at < len(run.pages):
                run = contents.split(run, at)
        # Its bytes go to the request's own slot first: making room may then cost the cache its copy.
        on_device = found is not None and contents.has_state(run, len(run.pages), Tier.DEVICE)
        if not self._reserve(visit, run):
            return None
        self._tick(run)
        moved, here = [], 0
        for one in reversed(list(run.path())):
            if one.kv >> Tier.DEVICE & 1:
                here += len(one.pages)
            else:
                moved.append(one)
                self._hand_over(visit, one)
        tier, loaded_bytes = "", sum(contents.kv_bytes(one) for one in moved)
        if found is not None:
            tier = "device" if on_device else "ssd" if visit.from_ssd[1] else "host"
            if not on_device:
                loaded_bytes += contents.state_bytes
                self._load_state(run)
        self.faults.release(visit)
        visit.run, visit.tokens = run, run.end * PAGE_TOKENS
        branch = near if run.end < near else None
        visit.plan = self.placement.positions(self._segment(visit, branch, parted))
        self._kept(moved)
        from_ssd = min(visit.from_ssd[0], run.end - here)
        restored = {
            "device": here * PAGE_TOKENS,
            "host": (run.end - here - from_ssd) * PAGE_TOKENS,
            "ssd": from_ssd * PAGE_TOKENS,
        }
        kv_match = min(reach, job.most_restored) * PAGE_TOKENS
        return Admission(restored, tier, kv_match, self.links.to_device.send(now_s, loaded_bytes))

    def computed(self, visit: Visit, tokens: int, now_s: float) -> None:
        self.now_s = now_s
        job = visit.job
        before, visit.tokens = visit.tokens // PAGE_TOKENS, tokens
        page, end = tokens // PAGE_TOKENS, len(job.prompt)
        self._grow(visit, job.prompt, page)
        wanted = {at for at in (*visit.plan, end) if before < at <= page}
        if before < page < end and self.placement.at_chunk_end(page):
            wanted.add(page)
        self._publish(visit, sorted(wanted), end if end in wanted else None, answer=False)
        if before < page < end:
            assert visit.run is not None
            self._chunk_ended((visit.run, page))

    def finish(self, visit: Visit, now_s: float) -> None:
        self.now_s = now_s
        pages = visit.job.pages
        more = len(pages) > len(visit.job.prompt)
        self._grow(visit, pages, len(pages))
        self._give_back(visit, *visit.room)
        assert visit.run is not None
        if more:
            self._publish(visit, [len(pages)], len(pages), answer=True)
        elif pages:
            self._ended_in_its_page((visit.run, len(pages)))
        self.contents.unlock(visit.run.path())

    def facts(self) -> dict[str, Any]:
        spaces = {space.name: space for space in (*self.contents.kv_space, *self.contents.state_space)}
        return {
            "ssd_written_bytes": self.links.ssd_write.carried_bytes,
            "ssd_read_bytes": self.links.ssd_read.carried_bytes,
            "budget_bytes": {name: space.limit for name, space in spaces.items()},
            "peak_bytes": {name: space.peak for name, space in spaces.items()},
            "evictions": self.evictions,
            "end_hit_share": self.contents.tree.end_share.value,
            **self.prices.facts(),
            "ssd_waits_given_up": self.faults.late,
            "ssd_reads_without_room": self.faults.no_room,
            **self.placement.facts(),
        }

    # Room on the device for a request.

    def _reserve(self, visit: Visit, run: Run) -> bool:
        """Lock the path to `run` and reserve what the request needs beside it, if that is possible at all."""
        contents = self.contents
        kv, states = contents.kv_space[Tier.DEVICE], contents.state_space[Tier.DEVICE]
        on_device = [one for one in run.path() if one.kv >> Tier.DEVICE & 1]
        pages = visit.job.room_pages - sum(len(one.pages) for one in on_device)
        need = pages * contents.page_bytes, contents.state_bytes
        newly = sum(contents.kv_bytes(one) for one in on_device if not one.device_locks)
        together = need[1] if states is kv else 0
        if kv.pinned + newly + need[0] + together > kv.limit or states.pinned + need[1] > states.limit:
            return False
        contents.lock(run.path())
        if not self.make_room(Tier.DEVICE, *need):
            contents.unlock(run.path())  # eviction may have split it
            return False
        for space, size in zip((kv, states), need, strict=True):
            space.take(size)
            space.pin(size)
        visit.room = need
        return True

    def _give_back(self, visit: Visit, kv_bytes: int, state_bytes: int) -> None:
        """Let go of a part of what is reserved."""
        contents = self.contents
        for space, size in (
            (contents.kv_space[Tier.DEVICE], kv_bytes),
            (contents.state_space[Tier.DEVICE], state_bytes),
        ):
            space.pin(-size)
            space.take(-size)
        visit.room = visit.room[0] - kv_bytes, visit.room[1] - state_bytes

    def _hand_over(self, visit: Visit, run: Run) -> None:
        """Have a run that the request has locked on the device, in the room that is reserved for it."""
        self._give_back(visit, self.contents.kv_bytes(run), 0)
        self.contents.set_kv(run, Tier.DEVICE, True)

    def _load_state(self, run: Run) -> None:
        """The checkpoint at the end of `run` comes from the host: keep it on the device if there is room."""
        if self.hold_state((run, run.end), Tier.DEVICE):
            self._loaded((run, run.end))

    def _segment(self, visit: Visit, branch: int | None, parted: tuple[int, int] | None) -> Segment:
        """What is left of the request's prompt."""
        start, end = visit.tokens, visit.job.prompt_tokens
        price, inside = self._state_price(), self.prices.inside(start, end)
        return Segment(start, end, branch, self.contents.pressure(), parted, price, inside)

    def _state_price(self) -> float:
        """Tokens that a historical checkpoint has to save."""
        return self.prices.of(Tier.SSD if self.has_ssd else Tier.HOST)

    def _tick(self, run: Run) -> None:
        """One request is admitted and resumes at the end of `run`."""
        contents = self.contents
        contents.clock += 1
        if run.parent is None:
            self.prices.requested(None)
        else:
            tokens = len(run.pages) * PAGE_TOKENS
            self.prices.requested(contents.clock - contents.tree.last_used(run.id, tokens))
            contents.tree.observe_hit(run.id, tokens)
        contents.touch(run, len(run.pages))

    # What a request leaves.

    def _grow(self, visit: Visit, pages: Pages, end: int) -> None:
        """Have the request's pages in the tree up to `end`. What the device had already is computed for nothing."""
        assert visit.run is not None
        new = []
        for run in self.contents.extend(visit.run, pages, end):
            self.contents.lock((run,))
            if run.kv >> Tier.DEVICE & 1:
                self._give_back(visit, self.contents.kv_bytes(run), 0)
            else:
                self._hand_over(visit, run)
                new.append(run)
            visit.run = run
        self.contents.touch(visit.run, len(visit.run.pages))
        if new:
            self._kept(new)

    def _publish(self, visit: Visit, pages: list[int], end: int | None, answer: bool) -> None:
        if not pages:
            return
        assert visit.run is not None
        places = [(visit.run, page) for page in pages]
        self._captured(places, places[-1] if pages[-1] == end else None, answer)

    def hold_state(self, place: Place, tier: Tier) -> bool:
        """Have a checkpoint in a tier if room can be made; return whether it was not there and is now."""
        contents = self.contents
        if contents.has_state(*contents.locate(place), tier):
            return False
        if not self.make_room(tier, 0, contents.state_size(tier)):
            return False
        contents.set_state(*contents.locate(place), tier, True)
        return True

    def back_up(self, run: Run) -> bool:
        """Copy a run's KV to the host, with what is above it; return whether all is there."""
        contents = self.contents
        missing = [one for one in run.path() if not one.kv >> Tier.HOST & 1]
        for one in reversed(missing):
            size = contents.kv_bytes(one)
            if not self.make_room(Tier.HOST, size, 0):
                return False
            contents.set_kv(one, Tier.HOST, True)
            self.links.to_host.send(self.now_s, size)
        return True

    # Eviction.

    def make_room(self, tier: Tier, kv_bytes: int, state_bytes: int) -> bool:
        """Evict until so much more fits; False if it cannot be."""
        kv, states = self.contents.kv_space[tier], self.contents.state_space[tier]
        if kv is states:
            return self._free(tier, self.kv_orders[tier], kv, kv_bytes + state_bytes)
        return self._free(tier, self.kv_orders[tier], kv, kv_bytes) and self._free(
            tier, self.state_orders[tier], states, state_bytes
        )

    def _free(self, tier: Tier, order: Order, space: Space, need: int) -> bool:
        if need > space.limit:
            return False
        while space.free < need:
            unit = self._next_victim(tier, order)
            if unit is None:
                return False
            self.evict(tier, unit)
        return True

    def _next_victim(self, tier: Tier, order: Order) -> Unit | None:
        return order.victim(lambda unit: self.usable(tier, unit))

    def usable(self, tier: Tier, unit: Unit) -> bool:
        """Return whether a unit may leave a tier now."""
        if unit.kind is Kind.INTERMEDIATE:
            assert unit.checkpoint is not None
            return tier is Tier.DEVICE or not self.contents.runs[unit.checkpoint[0]].host_locks
        return self.may_go(tier, self.contents.runs[unit.nodes[0]])

    def may_go(self, tier: Tier, run: Run) -> bool:
        """Return whether a run's KV may leave a tier now."""
        if tier is Tier.DEVICE:
            return not run.device_locks and not (run.host_locks and run.kv == 1 << tier)
        if run.host_locks:
            return False
        return self.host_drops_copies or tier is Tier.SSD or not run.kv >> Tier.DEVICE & 1

    def evict(self, tier: Tier, unit: Unit) -> None:
        """Have a unit leave a tier, and what is of no use then."""
        contents = self.contents
        self.evictions[f"{tier.name.lower()}_{unit.kind.value}"] += 1
        self.prices.evicted(tier, unit)
        place: Place | None = None
        if unit.checkpoint is not None:
            holder = contents.runs[unit.checkpoint[0]]
            place = holder, holder.start + unit.checkpoint[1] // PAGE_TOKENS
        if unit.kind is Kind.INTERMEDIATE:
            assert unit.checkpoint is not None
            state = contents.runs[unit.checkpoint[0]].states[unit.checkpoint[1] // PAGE_TOKENS]
            self._leaving(tier, unit.kind, place, [])
            if state.tiers >> tier & 1:
                self._drop_state(state.run, state.page, tier)
            return
        if unit.cut is not None:
            contents.split(contents.runs[unit.cut[0]], unit.cut[1] // PAGE_TOKENS)
        runs = [contents.runs[name] for name in unit.nodes]
        self._leaving(tier, unit.kind, place, runs)
        for run in runs:
            if run.parent is None:
                return  # making room below has cost it its last copy
            if not run.kv >> tier & 1 or not self.may_go(tier, run):
                return
            for at in [at for at in run.states if contents.has_state(run, at, tier)]:
                self._drop_state(run, at, tier)
            if run.kv == 1 << tier:
                contents.forget(run)
            else:
                contents.set_kv(run, tier, False)

    def _drop_state(self, run: Run, page: int, tier: Tier) -> None:
        if tier is Tier.SSD:
            self.contents.state_evicted_from_ssd(run, page)
        self.contents.set_state(run, page, tier, False)
