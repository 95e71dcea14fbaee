"""Where the checkpoints of a prompt go if the tier is chosen by price (`--histate-history cheapest`).

Prices, the write budget and what the SSD refuses follow from calls and times that are the same on all ranks, and so
does the choice.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_histate.adapter.ranking import Ranking
from sglang_histate.policy.history_tier import TierReason, historical_tier
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import LEAST_WRITE_TOKENS, MOST_PRICE
from sglang_histate.pool import HostArena
from sglang_histate.store import CheckpointStore, PutResult, Record

_NOWHERE = frozenset({PutResult.NO_BUFFER, PutResult.CLOSED})
"""Refusals that are not the SSD's own: the host cannot have it either."""


class Claimed(NamedTuple):
    """A record for one checkpoint, and where it is to go."""

    record: Record
    tier: Tier = Tier.SSD
    reason: TierReason = TierReason.FLAG


class HistoryTier:
    """Scheduler thread only."""

    def __init__(
        self,
        ranking: Ranking,
        store: CheckpointStore,
        arena: HostArena,
        *,
        state_bytes: int,
        stored_bytes: int,
        journal: Journal | None = None,
    ) -> None:
        """`state_bytes`: of a checkpoint on the host; `stored_bytes`: of one on the SSD."""
        self._ranking = ranking
        self._store = store
        self._arena = arena
        self._state_bytes = state_bytes
        self._stored_bytes = stored_bytes
        self._journal = journal

    def prices(self) -> tuple[float, float]:
        """Return the tokens that a checkpoint has to save on the host, and on the SSD."""
        fill = 1 - self._arena.free_pages / self._arena.total_pages
        host = self._ranking.scarcity.checkpoint(Tier.HOST, self._state_bytes, fill)
        return min(host, MOST_PRICE), min(self._ranking.checkpoint_price(), MOST_PRICE)

    def price(self) -> float:
        """Return what it has to save to be captured: the price of the cheaper tier, but never less than the work it makes."""
        return max(min(self.prices()), LEAST_WRITE_TOKENS)

    def on_host(self, key: bytes) -> bool:
        """Return whether the host has the checkpoint `key`."""
        place = self._ranking.ssd.marks.find(key)
        return place is not None and self._ranking.has_checkpoint(place, Tier.HOST)

    def claim(self, key: bytes, cost_tokens: float, *, is_end: bool) -> Claimed | PutResult:
        """Return a record for `key`, or why the SSD refuses it if it is not worth the host's price either.

        `cost_tokens`: what it saves one hit on its trajectory, see `capture_value`.
        """
        worth = self._ranking.scarcity.returns.probability(0) * cost_tokens
        value = cost_tokens / self._stored_bytes
        if self._choose(worth, is_end, refused=False) is Tier.HOST:
            claimed = self._for_host(TierReason.CHEAPER)
            if isinstance(claimed, Claimed):
                claimed.record.value = value  # should it have to go to the SSD after all
            return claimed
        found = self._store.claim_record(key, value)
        if isinstance(found, Record):
            return Claimed(found, Tier.SSD, TierReason.PROMPT_END if is_end else TierReason.CHEAPER)
        if found in _NOWHERE or self._choose(worth, is_end, refused=True) is None:
            return found
        return self._for_host(TierReason.REFUSED)

    def _choose(self, worth: float, is_end: bool, *, refused: bool) -> Tier | None:
        host, ssd = self.prices()
        chosen = historical_tier(host, ssd, worth, is_end=is_end, refused=refused)
        if self._journal is not None:
            self._journal.tier(host, ssd, worth, is_end, refused, chosen)
        return chosen

    def _for_host(self, reason: TierReason) -> Claimed | PutResult:
        """Return a record that costs no write; an eighth of them is left to reads all the same."""
        record = self._store.acquire_record() if self._store.records.free_for_writes else None
        return PutResult.NO_BUFFER if record is None else Claimed(record, Tier.HOST, reason)
