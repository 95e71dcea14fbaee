"""KV to the SSD ahead of need, as the server's `adapter.kv_spill` does it: cold host KV is copied before its room is wanted.

Where few bytes of the host are free or *clean* (the SSD has them too, and the device has not), the next bundles of
the ranking are copied, with what would go after them of the same trajectories, until enough are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.simulate.costs import PAGE_TOKENS
from eval.simulate.radix import Run
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Unit

if TYPE_CHECKING:
    from eval.simulate.histate import HiState

LOW_SHARE, HIGH_SHARE = 1 / 8, 1 / 4
"""Of the host: below the first, free and clean bytes together are brought up to the second."""

_CACHED = 1 << Tier.DEVICE | 1 << Tier.HOST


class CleanKv:
    """Bytes of KV that could leave the host at once and would cost nothing but a read.

    Those above KV that the SSD does not have do not count: it would have to go first.
    """

    def __init__(self, page_bytes: int) -> None:
        self.size_bytes = 0
        self._page_bytes = page_bytes
        self._clean: dict[Run, int] = {}
        self._blocks: dict[Run, Run] = {}  # run that has to go before its parent and would be lost -> parent
        self._blocked: dict[Run, int] = {}  # how many of those it has below itself

    def changed(self, run: Run) -> None:
        """Where the KV of `run` is has changed, or its place in the tree has."""
        changed = [run]
        while changed:
            one = changed.pop()
            held = one.kv & _CACHED
            clean = held == 1 << Tier.HOST and one.kv >> Tier.SSD & 1 and one not in self._blocked
            size = len(one.pages) * self._page_bytes if clean else 0
            self.size_bytes += size - self._clean.pop(one, 0)
            if size:
                self._clean[one] = size
            changed += self._block(one, one.parent if held and not clean else None)

    def _block(self, run: Run, parent: Run | None) -> list[Run]:
        before = self._blocks.get(run)
        if before is parent:
            return []
        if parent is None:
            del self._blocks[run]
        else:
            self._blocks[run] = parent
            self._blocked[parent] = self._blocked.get(parent, 0) + 1
        if before is not None:
            self._blocked[before] -= 1
            if not self._blocked[before]:
                del self._blocked[before]
        return [one for one in (before, parent) if one is not None and one.parent is not None]


class Spill:
    """Called whenever room on the host has changed. Half of the store's buffers stay for captures and reads."""

    def __init__(self, system: HiState) -> None:
        self._system = system
        self._refilling = False
        self._fruitless: tuple[int, int, int] | None = None
        self._woken_at = -1.0
        self.pages = 0

    def plan(self) -> None:
        """Start copies if the reserve is low."""
        system = self._system
        space = system.contents.kv_space[Tier.HOST]
        reserve = space.free + system.clean.size_bytes
        if reserve >= space.limit * HIGH_SHARE:
            self._refilling = False
        elif reserve < space.limit * LOW_SHARE:
            self._refilling = True
        situation = (system.contents.clock, space.free, system.clean.size_bytes)
        if not self._refilling or self._fruitless == situation:
            return
        wanted = int(space.limit * HIGH_SHARE) - reserve
        while wanted > 0:
            if not self._has_buffers():
                self._wake()
                return
            unit = system.kv_orders[Tier.HOST].victim(self._worth_it)
            if unit is None:
                self._fruitless = (system.contents.clock, space.free, system.clean.size_bytes)
                return
            wanted -= self._copy(self._going(unit), wanted)

    def _has_buffers(self) -> bool:
        system = self._system
        return system.links.writes_at(system.now_s) < system.buffers // 2

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
        return any(not contents.runs[name].kv >> Tier.SSD & 1 for name in unit.nodes)

    def _going(self, unit: Unit) -> list[Run]:
        """Return the bundle's runs, the deepest first, and those above that go after it: nobody else needs them."""
        contents = self._system.contents
        runs = [contents.runs[name] for name in unit.nodes]
        above = runs[-1].parent
        while above is not None and above.parent is not None and above.kv & _CACHED == 1 << Tier.HOST:
            if sum(child.kv >> Tier.HOST & 1 for child in above.children.values()) > 1:
                break
            runs.append(above)
            above = above.parent
        return [run for run in runs if not run.kv >> Tier.SSD & 1]

    def _copy(self, runs: list[Run], wanted: int) -> int:
        """Copy runs while there are buffers; return how many bytes that is. At least the first one is tried."""
        system, contents, copied = self._system, self._system.contents, 0
        for run in runs:
            if copied >= wanted or not self._has_buffers():
                break
            if run.parent is None or not system.write_kv(run):
                break
            copied += contents.kv_bytes(run)
            self.pages += len(run.pages)
        # Nothing could be written: the caller must not ask for the same unit for ever.
        return copied or wanted
