"""Metrics of the tiers: bytes, the SSD's reads and writes, its limits, and its health."""

from __future__ import annotations

from collections.abc import Callable

from sglang_histate.adapter.counters import Unverified
from sglang_histate.adapter.metric import (
    Figures,
    Labels,
    Values,
    all_of,
    by_kind,
    counter,
    each_directory,
    each_kind,
    gauge,
    histogram,
    one,
    or_unlimited,
)
from sglang_histate.store import DropReason, LossReason, MissReason, PutResult, RecordKind
from sglang_histate.store.breaker import BreakerState, BreakerStats
from sglang_histate.store.disk import FilePlace
from sglang_histate.store.roots import RootStats


def _used(figures: Figures) -> Values:
    device, host, kinds = figures.device, figures.host, figures.stats.kinds
    return {
        ("device", "kv"): device["kv"]["used_bytes"],
        ("device", "states"): device["states"]["used_bytes"],
        ("host", "kv"): host["kv"]["used_bytes"],
        ("host", "states"): host["states"]["used_bytes"],
        ("host", "inflight"): host["inflight"]["used_bytes"],
        ("ssd", "kv"): kinds[RecordKind.KV].bytes_used,
        ("ssd", "states"): kinds[RecordKind.CHECKPOINT].bytes_used,
    }


def _total(figures: Figures) -> Values:
    tiers = figures.device["total_bytes"], figures.host["total_bytes"], figures.stats.bytes_total
    return dict(zip((("device",), ("host",), ("ssd",)), tiers, strict=True))


def _peak(figures: Figures) -> Values:
    return {("host",): figures.host["peak_bytes"], ("ssd",): figures.stats.bytes_peak}


def _breakers(value: Callable[[BreakerStats], float]) -> Callable[[Figures], Values]:
    def read(figures: Figures) -> Values:
        values: dict[Labels, float] = {}
        for root in figures.stats.roots:
            values[root.name, "read"] = value(root.reads)
            values[root.name, "write"] = value(root.writes)
        return values

    return read


def _breaker_states(figures: Figures) -> Values:
    values: dict[Labels, float] = {}
    for root in figures.stats.roots:
        for operation, breaker in (("read", root.reads), ("write", root.writes)):
            for state in BreakerState:
                values[root.name, operation, state.value] = breaker.state is state
    return values


def _stuck(figures: Figures) -> Values:
    values: dict[Labels, float] = {}
    for root in figures.stats.roots:
        values[root.name, "read"], values[root.name, "write"] = root.stuck_reads, root.stuck_writes
    return values


def _directories(value: Callable[[RootStats], float]) -> Callable[[Figures], Values]:
    return lambda figures: each_directory(figures.stats.roots, value)


def _purges(figures: Figures) -> Values:
    purges = figures.stats.purges
    return {("asked",): purges.asked, ("done",): purges.done, ("failed",): purges.failed}


TIERS = (
    gauge("tier_used_bytes", "Bytes in use, by what they hold", _used, "tier", "kind", each_rank=True),
    gauge("tier_total_bytes", "Bytes that the tier has", _total, "tier", each_rank=True),
    gauge("tier_peak_bytes", "The most bytes that were ever used at once", _peak, "tier", each_rank=True),
    gauge("ssd_entries", "Records on the SSD", lambda f: each_kind(f, lambda k: k.entries), "kind"),
    gauge(
        "checkpoint_bytes",
        "Bytes of one checkpoint as the SSD has it",
        lambda f: one(f.facts["checkpoint_stored_bytes"]),
    ),
    gauge("kv_token_bytes", "Bytes of the KV of one token", lambda f: one(f.facts["kv_bytes_per_token"])),
    gauge(
        "inflight_records",
        "Host buffers for records on their way to or from the SSD",
        lambda f: one(f.stats.buffers_total),
        each_rank=True,
    ),
    gauge(
        "inflight_records_used",
        "Host buffers for records in use",
        lambda f: one(f.stats.buffers_total - f.stats.buffers_free),
        each_rank=True,
    ),
)
SSD = (
    histogram(
        "ssd_read_seconds",
        "Seconds of a read at the disk, verification included",
        lambda f: each_kind(f, lambda k: k.timings.read),
        "kind",
        each_rank=True,
    ),
    histogram(
        "ssd_read_wait_seconds",
        "Seconds that a read waits for a thread",
        lambda f: each_kind(f, lambda k: k.timings.read_wait),
        "kind",
        each_rank=True,
    ),
    histogram(
        "ssd_write_seconds",
        "Seconds of a write at the disk, stepping aside for reads included",
        lambda f: each_kind(f, lambda k: k.timings.write),
        "kind",
        each_rank=True,
    ),
    histogram(
        "ssd_write_wait_seconds",
        "Seconds that a write waits for the thread",
        lambda f: each_kind(f, lambda k: k.timings.write_wait),
        "kind",
        each_rank=True,
    ),
    counter(
        "ssd_puts",
        "Records offered to the SSD, by what became of them",
        lambda f: by_kind(f, PutResult, lambda k: k.puts),
        "kind",
        "result",
    ),
    counter(
        "ssd_entries_dropped",
        "Records that left the index, by why",
        lambda f: by_kind(f, DropReason, lambda k: k.drops),
        "kind",
        "reason",
        each_rank=True,
    ),
    counter(
        "ssd_read_misses",
        "Reads that gave nothing, by why",
        lambda f: by_kind(f, MissReason, lambda k: k.misses),
        "kind",
        "reason",
        each_rank=True,
    ),
    counter(
        "ssd_writes_cancelled",
        "Writes that came to nothing because their record was dropped meanwhile, by why",
        lambda f: by_kind(f, DropReason, lambda k: k.cancelled),
        "kind",
        "reason",
    ),
    counter(
        "ssd_reads",
        "Reads that succeeded, from the disk or from memory",
        lambda f: each_kind(f, lambda k: k.reads_ok),
        "kind",
    ),
    counter(
        "ssd_reads_from_memory",
        "Reads that were begun from a record on its way to the disk",
        lambda f: each_kind(f, lambda k: k.reads_shared),
        "kind",
    ),
    counter(
        "ssd_read_bytes",
        "Bytes read from the disk",
        lambda f: each_kind(f, lambda k: k.bytes_read),
        "kind",
        each_rank=True,
    ),
    counter(
        "ssd_written_bytes",
        "Bytes written to the disk",
        lambda f: each_kind(f, lambda k: k.bytes_written),
        "kind",
        each_rank=True,
    ),
    gauge(
        "ssd_reads_in_flight", "Reads that have not been committed", lambda f: one(f.stats.reads_in_flight)
    ),
    gauge(
        "ssd_writes_in_flight", "Writes that have not been committed", lambda f: one(f.stats.writes_queued)
    ),
    gauge(
        "write_rate_limit_bytes",
        "Bytes per second that may be written; +Inf without a limit",
        lambda f: one(or_unlimited(f.stats.writes.bytes_per_s)),
    ),
    gauge(
        "write_budget_bytes",
        "Bytes that could be written at once; +Inf without a limit",
        lambda f: one(or_unlimited(f.stats.writes.bytes_now)),
    ),
    gauge(
        "write_day_limit_bytes",
        "Bytes that may be written in a UTC day; +Inf without a limit",
        lambda f: one(or_unlimited(f.stats.writes.bytes_per_day)),
    ),
    gauge(
        "write_day_used_bytes", "Bytes admitted in this UTC day", lambda f: one(f.stats.writes.bytes_today)
    ),
    gauge(
        "write_price_ratio",
        "0: everything is written; towards 1: only what is worth most",
        lambda f: one(f.stats.writes.price),
    ),
    gauge(
        "write_queue_wait_seconds",
        "Seconds that one more write is expected to wait",
        lambda f: one(f.stats.writes.wait_s),
    ),
)
HEALTH = (
    gauge(
        "ssd_breaker",
        "1 for the state that a directory's breaker is in",
        _breaker_states,
        "directory",
        "operation",
        "state",
    ),
    counter(
        "ssd_breaker_opened",
        "Times that a breaker opened",
        _breakers(lambda b: b.times_opened),
        "directory",
        "operation",
    ),
    gauge(
        "ssd_stuck_operations",
        "Operations that were given up and still hang",
        _stuck,
        "directory",
        "operation",
        each_rank=True,
    ),
    counter(
        "ssd_hidden_lookups",
        "Lookups that found a record whose directory cannot be read",
        _directories(lambda r: r.hidden_lookups),
        "directory",
    ),
    gauge(
        "ssd_direct_io",
        "1 where the page cache is bypassed",
        _directories(lambda r: r.direct_io),
        "directory",
        each_rank=True,
    ),
    gauge(
        "ssd_file_lost",
        "1 where a restart would not find the file",
        _directories(lambda r: r.file_place is not FilePlace.PRESENT),
        "directory",
        each_rank=True,
    ),
    counter("verified", "Restored prefixes that were computed again", lambda f: one(f.counters.verified)),
    counter(
        "verify_mismatches",
        "Restored prefixes that were not what the SSD had: an alarm",
        lambda f: one(f.counters.mismatches),
    ),
    counter(
        "verify_skipped",
        "Samples that were not checked, by why",
        lambda f: all_of(Unverified, f.counters.unverified),
        "reason",
    ),
    gauge(
        "verify_pending", "Samples that wait for an idle server", lambda f: one(f.tier.verification.pending)
    ),
    gauge(
        "quarantined",
        "1 while the SSD tier is in quarantine: an alarm",
        lambda f: one(f.tier.verification.trust.quarantine is not None),
    ),
    gauge(
        "weights_changed",
        "1 once weights were replaced while the server runs",
        lambda f: one(f.tier.verification.trust.other_weights),
    ),
    gauge(
        "recovered_entries",
        "Records taken over at the start",
        lambda f: each_kind(f, lambda k: k.recovered),
        "kind",
    ),
    gauge(
        "recovery_dropped_entries",
        "Records not taken over at the start, by why",
        lambda f: all_of(LossReason, f.store.recovery.losses),
        "reason",
        each_rank=True,
    ),
    gauge(
        "recovery_seconds",
        "Seconds that taking over took at the start",
        lambda f: one(f.store.recovery.seconds),
        each_rank=True,
    ),
    counter("purges", "Purges of the SSD", _purges, "state", each_rank=True),
    counter(
        "purged_records", "Records that purges erased", lambda f: one(f.stats.purges.erased), each_rank=True
    ),
)
