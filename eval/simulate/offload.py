"""Systems that copy to slower tiers by kind of tier and not by kind of entry: vLLM with offload, HiCache.

Both copy to the host at once whatever the device gets, KV and checkpoints. They differ in what goes to the SSD:
`Cascade` writes what leaves the host, `Through` writes everything when it comes to the host and lets the host drop
it.
"""

from __future__ import annotations

from eval.simulate.contents import Place
from eval.simulate.radix import Run
from eval.simulate.tiered import Tiered
from sglang_histate.policy.placement import NO_COPIES, Copies, Room
from sglang_histate.policy.placement import place as fate
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind


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

    def _leaving(self, tier: Tier, kind: Kind, place: Place | None, runs: list[Run]) -> None:
        if tier is not Tier.HOST or not self.has_ssd:
            return
        contents, copies = self.contents, NO_COPIES
        if kind is Kind.INTERMEDIATE and place is not None:
            copies = Copies(ssd=contents.has_state(*contents.locate(place), Tier.SSD))
        if fate(kind, tier, place is not None, copies, Room(ssd_state=True, ssd_kv=True)).to is not Tier.SSD:
            return
        for run in reversed(runs):
            self.write_kv(run)
        if place is None or not contents.has_state(*contents.locate(place), Tier.HOST):
            return
        if self.hold_state(place, Tier.SSD):
            self.links.write_ssd(self.now_s, contents.ssd_state_bytes)

    def write_kv(self, run: Run) -> bool:
        """Have a run's KV on the SSD; return whether it is there."""
        if run.kv >> Tier.SSD & 1:
            return True
        size = self.contents.kv_bytes(run)
        if not self.make_room(Tier.SSD, size, 0):
            return False
        self.contents.set_kv(run, Tier.SSD, True)
        self.links.write_ssd(self.now_s, size)
        return True


class Through(Cascade):
    """SGLang's HiCache with write-through and a file backend: the SSD gets what the host gets.

    `hicache-storage-prefetch-policy wait_complete`: a request waits for its reads; `prefetch_threshold` one page, as on
    the engine in this project's comparisons (SGLang's default is 256 tokens).
    """

    host_drops_copies = False

    def _kept(self, runs: list[Run]) -> None:
        for run in runs:
            if self.has_host and self.back_up(run) and self.has_ssd:
                self.write_kv(run)

    def _captured(self, places: list[Place], end: Place | None, answer: bool) -> None:
        super()._captured(places, end, answer)
        for one in places:
            on_host = self.has_ssd and self.contents.has_state(*self.contents.locate(one), Tier.HOST)
            if on_host and self.hold_state(one, Tier.SSD):
                self.links.write_ssd(self.now_s, self.contents.ssd_state_bytes)

    def _leaving(self, tier: Tier, kind: Kind, place: Place | None, runs: list[Run]) -> None:
        """What the SSD has it has already."""
