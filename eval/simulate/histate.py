"""HiState as the server of this project does it: what is written where, and what goes first from the host.

- KV is copied to the host at once. Historical checkpoints go to the SSD at once and only pass through the host.
- Checkpoints on their way to the SSD need a buffer each. Interior ones for which there is none are not taken.
- The ends of prompt, answer and prefill chunks stay on the device too, and the answer's end on the host: the next turn
  starts there.
- An answer's end goes to the host if the store has its checkpoint, whether or not the answer completed a page.
- Cold KV goes to the SSD before the host needs its room (`spill`). A record there holds one checkpoint, or as many
  pages of KV of one path as fit in as many bytes; one that begins in what goes first is freed with it.
- The host drops first the checkpoints that only pass through, then what the SSD has, then the rest.
"""

from __future__ import annotations

from typing import Any

from eval.simulate.budgets import Budgets, Space
from eval.simulate.contents import Place
from eval.simulate.costs import PAGE_TOKENS, Costs
from eval.simulate.offload import Cascade
from eval.simulate.orders import MakeOrder, Order
from eval.simulate.placement import Placement
from eval.simulate.radix import Run, State
from eval.simulate.spill import Spill
from eval.simulate.system import Schedule
from sglang_histate.policy.clean import CleanKv
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Unit
from sglang_histate.policy.write_budget import WriteBudget

BUFFERS = 20
"""Checkpoints on their way: what fits into the 1 GiB that the server takes of host memory for them by default."""


class HiState(Cascade):
    """See the module docstring."""

    read_deadline_s = 5.0
    host_drops_copies = False

    def __init__(
        self,
        costs: Costs,
        budgets: Budgets,
        schedule: Schedule,
        *,
        placement: Placement,
        order: MakeOrder,
        packed: bool = False,
        by_price: bool = False,
        tail_tokens: int = 0,
        write_rate: int | None = None,
    ) -> None:
        """`packed`: KV takes on the SSD what it has, not whole records; it is written in as many parts all the same.

        `by_price`: a historical checkpoint goes to the SSD or the host, whichever costs less, not always to the SSD.
        `write_rate`: bytes per second that the SSD is written at most, None: no limit.
        """
        self.by_price = by_price
        self.tail_tokens = tail_tokens
        self.record_pages = max(costs.ssd_state_bytes // costs.page_bytes, 1)
        self.extent_pages = 0 if packed else self.record_pages
        self.buffers = BUFFERS * costs.state_bytes // costs.ssd_state_bytes
        self.host_overhead_bytes = BUFFERS * costs.state_bytes
        super().__init__(costs, budgets, schedule, placement=placement, order=order)
        self._writes = WriteBudget(write_rate, None, costs.ssd_state_bytes)
        self.clean = CleanKv(self.contents.tree)
        self.contents.kv_changed = lambda run: self.clean.changed(run.id)
        self.spill = Spill(self)
        self.captures = dict.fromkeys(("stored", "no_buffer", "no_room", "write_budget"), 0)

    def _kept(self, runs: list[Run]) -> None:
        super()._kept(runs)
        self.spill.plan()

    def _captured(self, places: list[Place], end: Place | None, answer: bool) -> None:
        contents, state_bytes = self.contents, self.contents.ssd_state_bytes
        found = [one for one in places if not contents.has_state(*contents.locate(one), Tier.SSD)]
        if self.by_price and self._historical_tier() is Tier.HOST:
            # KV is spilled only where the SSD has the checkpoint that it ends in, so an end goes there if anything can.
            ends = {end} if self.has_ssd else set()
            for one in found:
                if one not in ends and self.hold_state(one, Tier.HOST):
                    self.links.to_host.send(self.now_s, contents.state_bytes)
            found = [one for one in found if one in ends]
        for one in self._with_buffers(found):
            # The store's floor of values keeps bytes for the last one, which is worth most.
            if not self.may_write(state_bytes if one is found[-1] else 2 * state_bytes):
                self.captures["write_budget"] += 1
            elif self.hold_state(one, Tier.SSD):
                self.take_write(state_bytes)
                self.links.to_host.send(self.now_s, state_bytes)
                self.links.write_ssd(self.now_s, state_bytes)
                self.captures["stored"] += 1
            else:
                self.captures["no_room"] += 1
        if end is None:
            return
        self.hold_state(end, Tier.DEVICE)
        if answer and self.has_host:
            run, at = contents.locate(end)
            kept = (
                self.by_price
                or not self.has_ssd
                or contents.has_state(run, at, Tier.SSD)
                or self._writes.scarcity == 1
            )
            if kept and run.kv >> Tier.HOST & 1:
                self.hold_state(end, Tier.HOST)

    def may_write(self, size_bytes: int) -> bool:
        """Return whether the write rate has so many bytes now."""
        self._writes.advance(self.now_s)
        return self._writes.shortage(size_bytes) is None

    def may_spill(self, size_bytes: int) -> bool:
        """Return the same for KV: what comes at once, half of the burst, is for checkpoints, which cannot wait."""
        return self.may_write(size_bytes) and not self._writes.scarcity

    def take_write(self, size_bytes: int) -> None:
        """So many bytes are about to be written; `may_write` has said that they may."""
        self._writes.take(size_bytes)

    def _historical_tier(self) -> Tier:
        """The tier in which a historical checkpoint costs less; its bytes on the host are those of the device."""
        if not self.has_host or not self.has_ssd:
            return Tier.HOST if self.has_host else Tier.SSD
        return Tier.HOST if self.prices.of(Tier.HOST) < self._ssd_price() else Tier.SSD

    def _ssd_price(self) -> float:
        self._writes.advance(self.now_s)
        return self.prices.of(Tier.SSD, self._writes.scarcity)

    def _state_price(self) -> float:
        """Tokens that a historical checkpoint has to save."""
        tier = self._historical_tier() if self.by_price or not self.has_ssd else Tier.SSD
        return self._ssd_price() if tier is Tier.SSD else self.prices.of(tier)

    def _ended_in_its_page(self, place: Place) -> None:
        if self.contents.has_state(*self.contents.locate(place), Tier.DEVICE):
            self._captured([place], place, answer=True)

    def _chunk_ended(self, place: Place) -> None:
        # SGLang puts the state after every chunk into its tree; on the device, that is, and nowhere else.
        self.hold_state(place, Tier.DEVICE)

    def free_buffers(self) -> int:
        """Buffers that may be written to the SSD from: an eighth of all, at least one, is left to reads."""
        return max(self.buffers - self.links.writes_at(self.now_s) - max(1, self.buffers // 8), 0)

    def _with_buffers(self, places: list[Place]) -> list[Place]:
        """Keep as many as there are buffers: the last one, and of the others some that are evenly spread."""
        free = self.free_buffers()
        if len(places) <= free:
            return places
        self.captures["no_buffer"] += len(places) - free
        if not free:
            return []
        others, room = places[:-1], free - 1
        spread = [others[(2 * i + 1) * len(others) // (2 * room)] for i in range(room)]
        return [*spread, places[-1]]

    def _loaded(self, place: Place) -> None:
        run, at = self.contents.locate(place)
        if self.contents.has_state(run, at, Tier.HOST) and self.contents.has_state(run, at, Tier.SSD):
            self.contents.set_state(run, at, Tier.HOST, False)

    def _leaving(self, tier: Tier, kind: Kind, place: Place | None, runs: list[Run]) -> None:
        """What is worth a place below has it already."""

    def _free(self, tier: Tier, order: Order, space: Space, need: int) -> bool:
        if tier is Tier.HOST and need <= space.limit and space.free < need:
            for state in [state for state in self.contents.host_states if self._passes_through(state)]:
                if space.free >= need:
                    break
                self.contents.set_state(state.run, state.page, Tier.HOST, False)
        return super()._free(tier, order, space, need)

    def _passes_through(self, state: State) -> bool:
        """Whether a checkpoint on the host is an intermediate one that the SSD has too."""
        run = state.run
        if not state.tiers >> Tier.SSD & 1 or run.host_locks:
            return False
        at_end = state.page == len(run.pages)
        return not at_end or any(child.kv >> Tier.HOST & 1 for child in run.children.values())

    def _next_victim(self, tier: Tier, order: Order) -> Unit | None:
        if tier is Tier.HOST and self.clean.tokens:
            unit = order.victim(lambda unit: self.usable(tier, unit) and self._needs_no_write(unit))
            if unit is not None:
                return unit
        return super()._next_victim(tier, order)

    def _needs_no_write(self, unit: Unit) -> bool:
        """Whether nothing is lost that a spill would save."""
        if unit.kind is Kind.INTERMEDIATE or unit.checkpoint is None:
            return True
        runs = self.contents.runs
        if all(runs[name].kv >> Tier.SSD & 1 for name in unit.nodes):
            return True
        state = runs[unit.checkpoint[0]].states.get(unit.checkpoint[1] // PAGE_TOKENS)
        return state is None or not state.tiers >> Tier.SSD & 1

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "captures": self.captures,
            "spilled_pages": self.spill.pages,
            "spilled_records": self.spill.records,
        }
