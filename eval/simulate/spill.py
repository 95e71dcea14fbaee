"""KV to the SSD ahead of need, as the server's `adapter.kv_spill` does it: cold host KV is copied before its room is wanted.

Where few pages of the host are free or *clean* (the SSD has them too, and the device has not), the next bundles of
the ranking are copied, with what would go after them of the same trajectories, until enough are; but for those that are worth
less than what the SSD gives up for them. Where the host has little
but copies of what the device has, the device lets go of some first: they are what the host could give up next. How many
are enough, `sglang_histate.policy.reserve` says, as it does on the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.simulate.costs import PAGE_TOKENS
from eval.simulate.extents import Part
from eval.simulate.radix import Run
from sglang_histate.policy.prefix_nodes import CACHED, Tier
from sglang_histate.policy.reserve import Reserve
from sglang_histate.policy.units import Kind, Unit

if TYPE_CHECKING:
    from eval.simulate.histate import HiState


@dataclass(frozen=True, slots=True)
class Stretch:
    """`pages` pages of a path, from page `first` on, that the SSD does not have; the last is in `run`."""

    run: Run
    first: int
    pages: int


class Spill:
    """Called whenever room on the host has changed. Half of the store's buffers stay for captures and reads."""

    def __init__(self, system: HiState) -> None:
        self._system = system
        space, self._page = system.contents.kv_space[Tier.HOST], system.contents.page_bytes
        self._reserve = Reserve(max(space.limit // self._page, 1))
        self._at_s, self._before, self._seen = 0.0, 0, 0
        self._refilling = False
        self._fruitless: tuple[int, ...] | None = None
        self._kept: tuple[int, int] | None = None  # when the device had nothing more to let go of
        self._woken_at = -1.0
        self.pages = 0
        self.records = 0

    def plan(self) -> None:
        """Start copies if the reserve is low."""
        self._count_step()
        self._let_go()
        system, low, high = self._system, self._reserve.low, self._reserve.high
        situation = self._situation()
        reserve = situation[0] + situation[1]
        if reserve >= high:
            self._refilling = False
        elif reserve < low:
            self._refilling = True
        if not self._refilling or self._fruitless == situation:
            return
        wanted = high - reserve
        while wanted > 0:
            if not self._has_buffers():
                self._wake()
                return
            unit = system.kv_orders[Tier.HOST].victim(self._worth_it)
            started = None if unit is None else self._start(self._going(unit), wanted)
            if started is None:
                self._fruitless = self._situation()
                return
            wanted -= started

    def _let_go(self) -> None:
        """Have the device let go of what the host has too, if the host could give up too little."""
        system = self._system
        free = system.contents.kv_space[Tier.HOST].free // self._page
        device = system.contents.kv_space[Tier.DEVICE].limit // self._page
        pages = self._reserve.duplicates(free, system.clean.host_only_tokens // PAGE_TOKENS, device)
        if not system.has_ssd or not pages or self._kept == self._device_situation():
            return
        before = system.clean.host_only_tokens
        while (system.clean.host_only_tokens - before) // PAGE_TOKENS < pages:
            unit = system.kv_orders[Tier.DEVICE].victim(self._is_copy)
            if unit is None:
                self._kept = self._device_situation()
                return
            system.evict(Tier.DEVICE, unit)

    def _device_situation(self) -> tuple[int, int]:
        return self._system.contents.clock, sum(self._system.evictions.values())

    def _is_copy(self, unit: Unit) -> bool:
        """Whether the device loses nothing with a unit that other tiers have not got."""
        system, contents = self._system, self._system.contents
        if unit.kind is not Kind.BUNDLE or not system.usable(Tier.DEVICE, unit):
            return False
        if unit.checkpoint is not None:
            run, at = contents.runs[unit.checkpoint[0]], unit.checkpoint[1] // PAGE_TOKENS
            if not (contents.has_state(run, at, Tier.HOST) or contents.has_state(run, at, Tier.SSD)):
                return False
        return all(contents.runs[name].kv >> Tier.HOST & 1 for name in unit.nodes)

    def _count_step(self) -> None:
        """Tell the reserve what this step has taken of the host; all that happens at one time is one step."""
        system, taken = self._system, self._system.contents.kv_space[Tier.HOST].taken
        if system.now_s > self._at_s:
            self._at_s, self._before = system.now_s, self._seen
        self._seen = taken
        self._reserve.step((taken - self._before) // self._page, system.contents.clock)

    def _situation(self) -> tuple[int, int, int, int]:
        """Return the pages of the host that are free and those that are clean, then the clock and the evictions so far.

        One of them has to change before a fruitless search is worth another one.
        """
        system = self._system
        free, clean = system.contents.kv_space[Tier.HOST].free, system.clean.tokens
        return free // self._page, clean // PAGE_TOKENS, system.contents.clock, sum(system.evictions.values())

    def _has_buffers(self) -> bool:
        return self._system.free_buffers() > self._system.buffers // 2

    def _wake(self) -> None:
        """Go on when the next write has ended."""
        at_s = self._system.links.in_flight[0]
        if at_s > self._woken_at:
            self._woken_at = at_s
            self._system.schedule(at_s, self._woken)

    def _woken(self, now_s: float) -> None:
        self._system.now_s = now_s
        self.plan()

    def _worth_it(self, unit: Unit) -> bool:
        contents = self._system.contents
        if unit.kind is not Kind.BUNDLE or unit.checkpoint is None:
            return False
        if not self._system.may_go(Tier.HOST, contents.runs[unit.nodes[0]]):
            return False
        run, at = contents.runs[unit.checkpoint[0]], unit.checkpoint[1] // PAGE_TOKENS
        if not contents.has_state(run, at, Tier.SSD):
            return False
        # What the SSD has of a trajectory may be its last pages only: those before them go right after.
        ahead = all(contents.runs[name].kv >> Tier.SSD & 1 for name in unit.nodes)
        return (not ahead or bool(self._going(unit))) and self._system.prices.worth_copying(unit, ahead)

    def _going(self, unit: Unit) -> list[Run]:
        """Return the bundle's runs, the deepest first, and those above that go after it: nobody else needs them."""
        contents = self._system.contents
        runs = [contents.runs[name] for name in unit.nodes]
        above = runs[-1].parent
        while above is not None and above.parent is not None and above.kv & CACHED == 1 << Tier.HOST:
            if sum(child.kv >> Tier.HOST & 1 for child in above.children.values()) > 1:
                break
            runs.append(above)
            above = above.parent
        return [run for run in runs if not run.kv >> Tier.SSD & 1]

    def _start(self, runs: list[Run], wanted: int) -> int | None:
        """Copy what the SSD does not have of the runs while there are buffers; return how many pages that is.

        A record goes on over the end of a run where the one after has to go too. None: the SSD has no room.
        """
        most, started = self._system.record_pages, 0
        for stretch in self._stretches(runs):
            # Cut from the start, so that what the session gets next continues the last one; deepest first, as they go.
            for first in reversed(range(stretch.first, stretch.first + stretch.pages, most)):
                if started >= wanted or not self._has_buffers():
                    return started
                pages = min(most, stretch.first + stretch.pages - first)
                if not self._write(stretch.run, first, pages):
                    return None
                started += pages
        return started

    def _stretches(self, runs: list[Run]) -> list[Stretch]:
        """Return the longest stretches that the SSD does not have, the deepest first."""
        found: list[Stretch] = []
        for run in runs:
            for _, at, pages in reversed(self._system.contents.extents.missing(run)):
                first = run.start + at
                if found and found[-1].first == first + pages:
                    found[-1] = Stretch(found[-1].run, first, found[-1].pages + pages)
                else:
                    found.append(Stretch(run, first, pages))
        return found

    def _write(self, run: Run, first: int, pages: int) -> bool:
        """Copy one record, pages of the path to `run`; return whether the SSD has room for it and the write rate bytes."""
        system, contents = self._system, self._system.contents
        if not system.may_spill(pages * self._page):
            return False
        if not system.make_room(Tier.SSD, contents.extents.size_bytes(pages), 0):
            return False
        system.take_write(pages * self._page)
        parts = []
        for one in run.path():
            begin, end = max(first, one.start), min(first + pages, one.end)
            if begin < end:
                parts.append(Part(one, begin - one.start, end - begin))
            if one.start <= first:
                break
        contents.add_record(parts[::-1])
        system.links.write_ssd(system.now_s, pages * self._page)
        self.pages += pages
        self.records += 1
        return True
