"""Before a graceful exit: what the host has and the SSD does not is written, the most valuable first.

The event loop has ended, so nothing is asked of the other ranks any more: each saves what it can in the time that is
left, and the next start uses what all of them have.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.tier import SsdTier
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind, Unit
from sglang_histate.store import Key, PutResult, RecordKind, namespace_of

logger = logging.getLogger(__name__)

PAUSE_S = 0.001
"""Between two looks at writes that have not ended."""


@dataclass
class Saved:
    """`sessions`: ends of trajectories that a restart can resume; `left`: those that time or room did not allow."""

    sessions: int = 0
    left: int = 0
    kv_pages: int = 0
    checkpoints: int = 0


class Saving:
    """One pass over the host's bundles. Not to be used beside a running event loop."""

    def __init__(self, tier: SsdTier, read_state: Any, deadline_s: float) -> None:
        """`read_state(slot, payload)`: fill a record from a host slot. `deadline_s`: of `time.monotonic`."""
        self._tier = tier
        self._store = tier.store
        self._core = tier.core
        self._ranking = tier.ranking
        self._read_state = read_state
        self._deadline_s = deadline_s
        self._saved = Saved()
        self._refused = False

    def run(self) -> Saved:
        self._tier.land()
        before = self._tier.counters.kv_spilled_pages
        units = list(reversed(self._ranking.host.ranked()))
        for unit in units:
            if unit.kind is not Kind.BUNDLE or unit.checkpoint is None:
                continue
            path = self._path(unit.nodes[0])
            if path is None:
                continue
            if not self._late and not self._refused and self._save_state(unit) and self._save_kv(path):
                self._saved.sessions += 1
                self._keep(unit, path)
            else:
                self._saved.left += 1
        for unit in units:
            if unit.kind is Kind.INTERMEDIATE:
                self._save_historical(unit)
        while self._store.outstanding and not self._late:
            self._commit()
        self._saved.kv_pages = self._tier.counters.kv_spilled_pages - before
        return self._saved

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _path(self, node_id: Any) -> list[Any] | None:
        """Return the nodes that the end of one needs, deepest first; None if some KV is on the device alone."""
        node, path = self._core.node_by_id(node_id), []
        while node.parent is not None:
            backed = node.component_data[ComponentType.FULL].host_value is not None
            if (
                not backed and not self._ranking.ssd.has_kv(node.id)
            ) or node.id not in self._ranking.ssd.names:
                return None
            path.append(node.id)
            node = node.parent
        return path

    def _save_historical(self, unit: Unit) -> None:
        """Write a checkpoint inside a session that was saved, if only the host has it."""
        assert unit.checkpoint is not None
        if self._late or self._refused or self._ranking.has_checkpoint(unit.checkpoint, Tier.SSD):
            return
        path = self._path(unit.checkpoint[0])
        if path is not None and all(map(self._ranking.ssd.has_kv, path)) and self._save_state(unit):
            self._keep(unit, path)

    def _save_state(self, unit: Unit) -> bool:
        """See to it that the SSD has the unit's checkpoint."""
        assert unit.checkpoint is not None
        if self._ranking.has_checkpoint(unit.checkpoint, Tier.SSD):
            return True
        node_id, offset = unit.checkpoint
        node = self._core.node_by_id(node_id)
        slot = node.component_data[ComponentType.MAMBA].host_value
        if slot is None or offset != len(node.key):
            return False
        record = self._record()
        if record is None:
            return False
        self._read_state(slot, record.payload)
        key = self._ranking.ssd.names.of(node_id)[-1]
        position = self._ranking.tree.start(node_id) + offset
        namespace = namespace_of(node.key.extra_key, node.key.cache_salt)
        if self._store.put(key, position, record, namespace=namespace) is not PutResult.STORED:
            self._refused = True
            return False
        self._ranking.placed(key, node, offset, True)
        self._saved.checkpoints += 1
        return True

    def _save_kv(self, path: list[Any]) -> bool:
        """Copy what the SSD does not have of the path's KV; return whether it has all of it then."""
        spill = self._tier.kv_spill
        while not all(self._ranking.ssd.has_kv(node) for node in path):
            if self._late:
                return False
            refused = self._tier.counters.kv_spills_refused
            if not spill.copy(path) and not self._store.outstanding:
                return False
            spill.finish(len(spill))
            self._keep_kv(path)
            if self._tier.counters.kv_spills_refused > refused:
                self._refused = True
                return False
            self._commit()
        return True

    def _keep(self, unit: Unit, path: list[Any]) -> None:
        """What was saved must not make room for what is worth less."""
        assert unit.checkpoint is not None
        self._ranking.kept.add(Key(self._ranking.ssd.marks.key_at(*unit.checkpoint)))
        self._keep_kv(path)

    def _keep_kv(self, path: list[Any]) -> None:
        extents = self._ranking.ssd.extents
        self._ranking.kept.update(Key(key, RecordKind.KV) for node in path for key in extents.keys(node))

    def _record(self) -> Any | None:
        while (record := self._store.acquire_record()) is None and not self._late:
            self._commit()
        return record

    def _commit(self) -> None:
        for ticket in self._store.poll().reads:
            self._store.release(ticket)
        time.sleep(PAUSE_S)


def save_for_restart(tier: SsdTier, read_state: Any, seconds: float) -> None:
    """Save for at most `seconds` and log what became of it. Never raises: the exit goes on."""
    start_s = time.monotonic()
    try:
        saved = Saving(tier, read_state, start_s + seconds).run()
    except Exception:
        logger.exception("HiState: saving for a restart failed; what the SSD has stays usable")
        return
    logger.info(
        "HiState: %d sessions can be resumed after a restart, %d more had no time or room "
        "(--histate-shutdown-time); wrote %d pages of KV and %d checkpoints in %.1f s",
        saved.sessions,
        saved.left,
        saved.kv_pages,
        saved.checkpoints,
        time.monotonic() - start_s,
    )
