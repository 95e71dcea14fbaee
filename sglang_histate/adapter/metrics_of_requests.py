"""Metrics of what requests get from the cache, what is captured for them, and what the policy makes of it."""

from __future__ import annotations

from sglang_histate.adapter.counters import Drop, Miss
from sglang_histate.adapter.hints import Hint, Ignored
from sglang_histate.adapter.metric import Figures, Values, all_of, by, counter, gauge, histogram, one
from sglang_histate.policy.placement import Reason
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.units import Kind


def _intervals(figures: Figures) -> Values:
    supported = dict.fromkeys(figures.facts["config"]["intervals"], 0)
    return by(supported | figures.counters.intervals)


def _residence(figures: Figures) -> Values:
    kv, state = figures.ranking.residences()
    return {("kv",): kv or 0.0, ("states",): state or 0.0}


def _evictions(figures: Figures) -> Values:
    counts = figures.ranking.evictions
    return {
        (tier.name.lower(), kind.value): counts[f"{tier.name.lower()}_{kind.value}"]
        for tier in Tier
        for kind in Kind
    }


def _historical(figures: Figures) -> Values:
    counts = figures.counters.historical
    return {(tier.name.lower(), reason.value): count for (tier, reason), count in counts.items()}


HITS = (
    counter(
        "requests",
        "Requests that were in their first batch; health checks are not counted",
        lambda f: one(f.counters.requests),
    ),
    counter("prompt_tokens", "Tokens of their prompts", lambda f: one(f.counters.prompt_tokens)),
    counter(
        "hits",
        "Requests that resumed, by the tier that the checkpoint was in",
        lambda f: by(f.counters.hits),
        "tier",
    ),
    counter(
        "hit_tokens",
        "Tokens that were not computed, by the tier that the checkpoint was in",
        lambda f: by(f.counters.hit_tokens),
        "tier",
    ),
    counter(
        "hit_kv_tokens",
        "The same tokens, by the tier that their KV was in",
        lambda f: by(f.counters.hit_kv_tokens),
        "tier",
    ),
    counter(
        "internal_hits",
        "Requests whose KV reached past every state in memory, where the SSD had a checkpoint",
        lambda f: one(f.counters.internal_hits),
    ),
    counter(
        "recomputed_tokens",
        "Tokens computed again though their KV was in memory, by why no checkpoint restored them",
        lambda f: by(f.counters.recomputed),
        "reason",
    ),
    counter(
        "ssd_misses",
        "Checkpoints on the SSD that a request could have used and did not, by why",
        lambda f: all_of(Miss, f.counters.missed),
        "reason",
    ),
    counter(
        "fault_ins", "Reads of checkpoints that were begun for requests", lambda f: one(f.counters.fault_ins)
    ),
    counter("kv_restores", "Times that KV came back from the SSD", lambda f: one(f.counters.kv_restores)),
    counter(
        "kv_restored_pages",
        "Pages of KV that came back from the SSD",
        lambda f: one(f.counters.kv_restored_pages),
    ),
    gauge("requests_waiting", "Requests that wait for a read", lambda f: one(f.tier.fault_ins.waiting)),
)
CHECKPOINTS = (
    counter(
        "checkpoints_planned",
        "Checkpoints that a forward pass was to capture",
        lambda f: one(f.counters.planned),
    ),
    counter(
        "checkpoints_captured",
        "Checkpoints whose bytes have arrived from the device",
        lambda f: one(f.counters.captured),
    ),
    counter(
        "checkpoints_already_stored",
        "Planned positions that the SSD had",
        lambda f: one(f.counters.already_stored),
    ),
    counter(
        "output_end_checkpoints", "Ends of outputs that were copied", lambda f: one(f.counters.output_ends)
    ),
    counter(
        "historical_checkpoints",
        "Checkpoints of prompts, by the tier that they went to and why",
        _historical,
        "tier",
        "reason",
    ),
    counter(
        "checkpoints_dropped",
        "Planned checkpoints that were not captured or not stored, by why",
        lambda f: all_of(Drop, f.counters.dropped),
        "reason",
    ),
    counter("capture_forwards", "Forward passes that captured something", lambda f: one(f.counters.forwards)),
    counter(
        "intervals_chosen",
        "Prompts, by the interval in tokens that was chosen for what they add; 0 is none",
        _intervals,
        "interval",
    ),
    counter(
        "kv_spilled_pages",
        "Pages of KV written to the SSD ahead of need",
        lambda f: one(f.counters.kv_spilled_pages),
    ),
    counter(
        "kv_spills_refused",
        "Extents of KV that the SSD did not take",
        lambda f: one(f.counters.kv_spills_refused),
    ),
    counter(
        "hints",
        "Hints of clients that were understood",
        lambda f: all_of(Hint, f.counters.hints),
        "hint",
    ),
    counter(
        "hints_ignored",
        "Hints of clients, or values in them, that had no effect, by why",
        lambda f: all_of(Ignored, f.counters.hints_ignored),
        "reason",
    ),
)
POLICY = (
    gauge(
        "residence_requests",
        "How long KV stays in the cache and states on the SSD, in requests; 0 while unknown",
        _residence,
        "kind",
    ),
    gauge(
        "pressure_ratio",
        "How long KV stays over how long states stay: what spaces checkpoints",
        lambda f: one(f.ranking.shown_pressure()),
    ),
    gauge("end_hit_ratio", "Share of hits at the end of a trajectory", lambda f: one(f.ranking.end_share())),
    counter(
        "evictions",
        "Units that were evicted: an intermediate checkpoint, or a bundle",
        _evictions,
        "tier",
        "kind",
    ),
    counter(
        "evictions_by_reason",
        "Units that were evicted, by what it means",
        lambda f: all_of(Reason, f.ranking.fates),
        "reason",
    ),
    counter(
        "policy_seconds",
        "Seconds that the scheduler thread was in HiState's own code, by what for",
        lambda f: by(f.ranking.policy_time.seconds),
        "part",
        each_rank=True,
    ),
    gauge(
        "ranks_agree", "1 while all ranks have evicted the same; 0 is a fault", lambda f: one(f.tier.agree)
    ),
)
TIMES = (
    histogram(
        "queue_seconds", "Seconds from the queue to the first batch", lambda f: {(): f.counters.queue_s}
    ),
    histogram(
        "read_wait_seconds",
        "Seconds that a request was held back for its reads, of those that were",
        lambda f: {(): f.counters.read_wait_s},
    ),
    histogram(
        "fault_in_seconds",
        "Seconds from the start of a fault-in to its end",
        lambda f: {(): f.counters.fault_in_s},
    ),
)
