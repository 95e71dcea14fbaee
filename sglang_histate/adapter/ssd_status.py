"""The SSD tier in the status: bytes, what was found at the start, limits for writes, and each directory's health."""

from __future__ import annotations

from typing import Any

from sglang_histate.store import CheckpointStore, LossReason, RecoveryReport, StoreStats
from sglang_histate.store.breaker import BreakerStats
from sglang_histate.store.roots import RootStats


def ssd_status(store: CheckpointStore, stats: StoreStats) -> dict[str, Any]:
    """Return one rank's part as JSON values; `stats` are the store's."""
    return {
        "checkpoints": {
            "used": stats.slabs_used,
            "total": stats.slabs_total,
            "used_bytes": stats.bytes_used,
            "total_bytes": stats.bytes_total,
            "peak_bytes": stats.bytes_peak,
        },
        "kinds": {
            kind.name.lower(): {"entries": part.entries, "used_bytes": part.bytes_used}
            for kind, part in stats.kinds.items()
        },
        "entries": stats.entries,
        "entries_writing": stats.entries_writing,
        "direct_io": stats.direct_io,
        "breaker_open": stats.breaker_open,
        "files_lost": stats.files_lost,
        "recovered": _recovered(store.recovery),
        "directories": [_directory(root) for root in stats.roots],
        "writes": {
            "bytes_per_second": stats.writes.bytes_per_s,
            "burst_bytes": stats.writes.burst_bytes,
            "bytes_now": stats.writes.bytes_now,
            "bytes_per_day": stats.writes.bytes_per_day,
            "bytes_today": stats.writes.bytes_today,
            "price": round(stats.writes.price, 4),
            "expected_wait_seconds": round(stats.writes.wait_s, 3),
        },
    }


def _recovered(report: RecoveryReport) -> dict[str, Any]:
    """Return what this server found on the SSD when it started, and what it did not take over, by reason."""
    return {
        "checkpoints": report.checkpoints,
        "kv_extents": report.extents,
        "seconds": round(report.seconds, 3),
        "last_exit_in_order": report.clean,
        "dropped": {reason.value: report.losses.get(reason, 0) for reason in LossReason},
    }


def _directory(root: RootStats) -> dict[str, Any]:
    """Return the health of one of the directories of `--histate-ssd-dir`."""
    return {
        "name": root.name,
        "slabs_used": root.slabs_used,
        "slabs_total": root.slabs_total,
        "direct_io": root.direct_io,
        "file": root.file_place.value,
        "reads": _breaker(root.reads),
        "writes": _breaker(root.writes),
        "hidden_lookups_total": root.hidden_lookups,
        "stuck_reads": root.stuck_reads,
        "stuck_writes": root.stuck_writes,
    }


def _breaker(stats: BreakerStats) -> dict[str, Any]:
    return {
        "state": stats.state.value,
        "times_opened_total": stats.times_opened,
        "reason": stats.reason,
        "failed_in_a_row": stats.failed_in_a_row,
    }
