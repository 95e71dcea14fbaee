"""Marconi's order of eviction (arXiv:2411.19379), as its paper and public descriptions of it say.

Candidates are nodes with at most one child: a leaf goes with its KV and its state, another one gives up its state and
its KV becomes the child's. The lowest S = recency + alpha * FLOP efficiency goes, with both brought to 0 .. 1 over the
candidates; FLOP efficiency is what a hit there saves beyond a hit at the node before it, over the bytes that go.

Read into it here: efficiency counts from the checkpoint before, which is what remains to be hit; recency is the last
hit of the very node; KV without a state behind it is good for nothing and goes before all others, which are scaled
without it; alpha is fixed. The paper begins with alpha 0 and then tunes it by replaying recent requests with several
values.
"""

from __future__ import annotations

from collections.abc import Callable

from eval.simulate.contents import Contents
from eval.simulate.costs import PAGE_TOKENS, Costs
from eval.simulate.orders import MakeOrder
from eval.simulate.radix import Run, State
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Pool, Unit

DEFAULT_ALPHA = 1.0
"""Recency and efficiency count alike."""

_DEVICE = 1 << Tier.DEVICE


def flop_aware(costs: Costs, alpha: float = DEFAULT_ALPHA) -> MakeOrder:
    """Return orders for a device that KV and states share.

    Raises:
        ValueError: a negative `alpha`.
    """
    if alpha < 0:
        raise ValueError(f"alpha {alpha} is negative: 0 is least recently used, more counts saved work more")
    return lambda contents, pool: FlopOrder(contents, pool, costs, alpha)


class FlopOrder:
    """The candidates are ranked anew once per request: within one, what was ranked goes in that order."""

    def __init__(self, contents: Contents, pool: Pool, costs: Costs, alpha: float) -> None:
        self.pool = pool
        self._contents = contents
        self._costs = costs
        self._alpha = alpha
        self._ranked: list[State | Run] = []  # the next one last
        self._at = -1

    def victim(self, usable: Callable[[Unit], bool]) -> Unit | None:
        fresh = self._at != self._contents.clock
        if fresh:
            self._rank()
        while True:
            while self._ranked:
                unit = self._unit(self._ranked.pop())
                if unit is not None and usable(unit):
                    return unit
            if fresh:
                return None
            self._rank()
            fresh = True

    def _rank(self) -> None:
        self._at = self._contents.clock
        found: list[tuple[State, float, float]] = []
        tails: list[State | Run] = []
        for run in self._contents.runs.values():
            if not run.kv & _DEVICE:
                continue
            below = sum(child.kv & _DEVICE for child in run.children.values())
            for page, state in run.states.items():
                if state.tiers & _DEVICE and (page < len(run.pages) or below <= 1):
                    found.append((state, float(state.used), self._efficiency(state, not below)))
            if not below and len(run.pages) not in run.states:
                tails.append(run)
        times = _scaled([used for _, used, _ in found])
        saved = _scaled([efficiency for _, _, efficiency in found])
        scores = [time + self._alpha * share for time, share in zip(times, saved, strict=True)]
        order = sorted(range(len(found)), key=lambda index: (-scores[index], -index))
        self._ranked = [*(found[index][0] for index in order), *reversed(tails)]

    def _before(self, run: Run, page: int) -> int:
        """Pages up to the checkpoint before the one at `page`, 0 if there is none."""
        while run.parent is not None:
            found = max((at for at, state in run.states.items() if at < page), default=0)
            if found:
                return run.start + found
            run = run.parent
            page = len(run.pages) + 1
        return 0

    def _efficiency(self, state: State, leaf: bool) -> float:
        before = self._before(state.run, state.page)
        pages = state.run.start + state.page - before
        flop = self._costs.prefill_flop(pages * PAGE_TOKENS, before * PAGE_TOKENS)
        kv = pages * self._costs.page_bytes if leaf and state.page == len(state.run.pages) else 0
        return flop / (self._costs.state_bytes + kv)

    def _unit(self, entry: State | Run) -> Unit | None:
        """Return what goes with a ranked entry now, None if it is gone or no candidate any more."""
        run, page = (entry.run, entry.page) if isinstance(entry, State) else (entry, len(entry.pages))
        if run.parent is None or not run.kv & _DEVICE:
            return None
        if isinstance(entry, State) and not entry.tiers & _DEVICE:
            return None
        place = (run.id, page * PAGE_TOKENS) if isinstance(entry, State) else None
        leaf = page == len(run.pages) and not any(child.kv & _DEVICE for child in run.children.values())
        state_bytes = self._costs.state_bytes if place else 0
        if not leaf:
            if place is None:
                return None
            return Unit(Kind.INTERMEDIATE, Tier.DEVICE, place, True, (), None, state_bytes, 0.0, 0, 0.0)
        nodes, cut = self._bundle(run, self._before(run, page))
        size = state_bytes + len(run.pages) * self._costs.page_bytes
        return Unit(Kind.BUNDLE, Tier.DEVICE, place, place is not None, nodes, cut, size, 0.0, 0, 0.0)

    def _bundle(self, run: Run, limit: int) -> tuple[tuple[int, ...], tuple[int, int] | None]:
        """Return the runs whose KV goes, the deepest first, and where the last one is cut."""
        nodes = [run.id]
        while run.start > limit:
            above = run.parent
            assert above is not None
            if above.parent is None or sum(child.kv & _DEVICE for child in above.children.values()) > 1:
                break
            run = above
            nodes.append(run.id)
        return tuple(nodes), (run.id, (limit - run.start) * PAGE_TOKENS) if run.start < limit else None


def _scaled(values: list[float]) -> list[float]:
    """Bring values to 0 .. 1 by the least and the largest; all 0 if they are equal."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]
