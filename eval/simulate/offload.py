"""Systems that copy to slower tiers by kind of tier and not by kind of entry: vLLM with offload, HiCache.

Both copy to the host at once whatever the device gets, KV and checkpoints. They differ in what goes to the SSD:
`Cascade` writes what leaves the host, `Through` writes everything when it comes to the host and lets the host drop
it.
"""

from __future__ import annotations

from eval.simulate.costs import PAGE_TOKENS
from eval.simulate.radix import Run
from eval.simulate.tiered import Place, Tiered
from sglang_histate.policy.placement import NO_COPIES, Copies, Room, place
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Unit


class Cascade(Tiered):
    """Device, host and SSD as far as there are; without a host the device only."""

    def _kept(self, runs: list[Run]) -> None:
        if self.has_host:
            for run in runs:
                self.back_up(run)

    def _captured(self, places: list[Place], end: Place | None, answer: bool) -> None:
        for one in places:
            state_bytes = self.contents.state_bytes
            self.hold_state(one, Tier.DEVICE)
            if self.has_host and self.hold_state(one, Tier.HOST):
                self.links.to_host.send(self.now_s, state_bytes)

    def _leaving(self, tier: Tier, unit: Unit, runs: list[Run]) -> None:
        if tier is Tier.HOST and self.has_ssd:
            copies = NO_COPIES
            if unit.kind is Kind.INTERMEDIATE:
                assert unit.checkpoint is not None
                run, at = self.contents.runs[unit.checkpoint[0]], unit.checkpoint[1] // PAGE_TOKENS
                copies = Copies(ssd=self.contents.has_state(run, at, Tier.SSD))
            restorable = unit.checkpoint is not None
            room = Room(ssd_state=True, ssd_kv=True)
            if place(unit.kind, tier, restorable, copies, room).to is Tier.SSD:
                self._write(unit, runs)

    def _write(self, unit: Unit, runs: list[Run]) -> None:
        """Have a unit on the SSD: its KV from the top down, then its checkpoint."""
        for run in reversed(runs):
            self.write_kv(run)
        if unit.checkpoint is not None:
            run, at = self.contents.runs[unit.checkpoint[0]], unit.checkpoint[1] // PAGE_TOKENS
            if self.contents.has_state(run, at, Tier.HOST) and self.hold_state((run, at), Tier.SSD):
                self.links.write_ssd(self.now_s, self.contents.state_bytes)

    def write_kv(self, run: Run) -> bool:
        """Have a run's KV on the SSD; return whether it is there."""
        if run.kv >> Tier.SSD & 1:
            return True
        size = self.contents.ssd_bytes(len(run.pages))
        if not self.make_room(Tier.SSD, size, 0):
            return False
        self.contents.set_kv(run, Tier.SSD, True)
        self.links.write_ssd(self.now_s, self.contents.kv_bytes(run))
        return True


class Through(Cascade):
    """SGLang's HiCache with write-through and a file backend: the SSD gets what the host gets.

    `hicache-storage-prefetch-policy wait_complete`: a request waits for its reads; `prefetch-threshold` 256 tokens.
    """

    host_drops_copies = False
    least_gain_pages = 256 // PAGE_TOKENS

    def _kept(self, runs: list[Run]) -> None:
        for run in runs:
            if self.has_host and self.back_up(run) and self.has_ssd:
                self.write_kv(run)

    def _captured(self, places: list[Place], end: Place | None, answer: bool) -> None:
        super()._captured(places, end, answer)
        for run, at in places:
            on_host = self.has_ssd and self.contents.has_state(run, at, Tier.HOST)
            if on_host and self.hold_state((run, at), Tier.SSD):
                self.links.write_ssd(self.now_s, self.contents.state_bytes)

    def _leaving(self, tier: Tier, unit: Unit, runs: list[Run]) -> None:
        """What the SSD has it has already."""
