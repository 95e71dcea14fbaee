"""Counters with a reason each. All names exist from the start at 0, so that a dashboard never misses a series."""

from __future__ import annotations

from enum import Enum

from sglang_histate.adapter.hints import Hint, Ignored
from sglang_histate.policy.history_tier import CHOICES
from sglang_histate.store import Distribution


class Drop(Enum):
    """Why a planned checkpoint was not captured or not stored."""

    NO_RECORD = "no_inflight_buffer"
    REFUSED = "ssd_refused"
    HOST_PRICE = "ssd_refused_host_too_dear"  # and it saves less than its place on the host costs
    NO_HOST_PLACE = "ssd_refused_no_place_on_host"  # there is no room, or no KV that it restores
    NOT_COPIED = "not_copied_to_host"  # the copy failed, or its state is not finite
    ABORTED = "request_aborted"
    MISALIGNED = "chunk_not_on_grid"
    CACHE_RESET = "cache_reset"


class Miss(Enum):
    """Why a checkpoint in the SSD tier was not used for a request that could have used it."""

    NO_ROOM = "no_read_buffer_or_host_slot"
    READ_FAILED = "read_failed"
    KV_GONE = "kv_evicted_while_reading"
    NO_HOST_KV = "no_host_room_for_kv"
    DEADLINE = "read_deadline"
    NOT_LOADED = "attached_but_not_loaded"
    ABORTED = "request_aborted"
    CACHE_RESET = "cache_reset"
    RETRIES = "gave_up_after_retries"


class Why(Enum):
    """Why no request could resume at a position whose KV was on device or host."""

    NOT_CAPTURED = "not_captured"  # no checkpoint was planned there
    NO_BUFFER = "no_inflight_buffer"
    OFF_GRID = "chunk_not_on_grid"
    WRITE_LIMITS = "write_budget"  # bytes per second or day, or the age of the queue
    NO_SLAB = "no_slab"
    EVICTED = "evicted"
    ABORTED = "request_aborted"
    PURGED = "purged"
    WRITE_FAILED = "write_failed"
    READ_FAILED = "read_failed"
    DAMAGED = "record_damaged"
    DISK_DOWN = "disk_down"  # a breaker is open: nothing is asked of the disk
    FINGERPRINT = "fingerprint"  # the record, or the store, belongs to other weights
    QUARANTINED = "quarantined"
    SMALL_GAIN = "gain_too_small"  # below --histate-min-gain
    NO_ROOM = "no_read_buffer_or_host_slot"
    NO_HOST_ROOM = "no_host_room_for_kv"
    DEADLINE = "read_deadline"  # of this read, or of another one that still hangs
    RETRIES = "gave_up_after_retries"
    NOT_LOADED = "not_loaded"  # the state was in memory, and the device had no room for it or its KV
    NOT_ASKED = "ssd_not_asked"  # more than tokens, or a streaming session: no checkpoint can have a name
    LATE = "stored_after_lookup"


class HitTier(Enum):
    """Where the checkpoint that a request resumed from was, or the KV before it."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


class Unverified(Enum):
    """Why a restored prefix that was to be checked was not."""

    NEVER_IDLE = "never_idle"  # as many wait already as may
    TOO_LONG = "prefix_too_long"
    NOT_ONLY_TOKENS = "more_than_tokens"  # an adapter or images: the tokens alone do not give the state
    RECORD_GONE = "checkpoint_gone"
    READ_FAILED = "read_failed"
    INTERRUPTED = "interrupted"  # by requests, each time that it was tried
    PURGED = "purged"
    NOT_ADMITTED = "not_admitted"  # the memory of the device did not suffice
    CACHE_RESET = "cache_reset"


class Counters:
    """Plain integers that only grow. Written on the scheduler thread only."""

    def __init__(self) -> None:
        self.planned = 0
        self.captured = 0
        self.already_stored = 0
        self.forwards = 0
        self.fault_ins = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.hits = dict.fromkeys(HitTier, 0)
        self.hit_tokens = dict.fromkeys(HitTier, 0)
        self.hit_kv_tokens = dict.fromkeys(HitTier, 0)
        self.internal_hits = 0
        self.output_ends = 0
        self.historical = dict.fromkeys(CHOICES, 0)  # by tier and reason
        self.recomputed = dict.fromkeys(Why, 0)
        self.kv_spilled_pages = 0
        self.kv_spills_refused = 0
        self.kv_restores = 0
        self.kv_restored_pages = 0
        self.verified = 0
        self.mismatches = 0
        self.unverified = {reason: 0 for reason in Unverified}
        self.dropped = {reason: 0 for reason in Drop}
        self.missed = {reason: 0 for reason in Miss}
        self.queue_s = Distribution()  # from the queue to the first batch
        self.read_wait_s = Distribution()  # of requests that waited for a read
        self.fault_in_s = Distribution()
        self.intervals: dict[int, int] = {}
        self.hints = dict.fromkeys(Hint, 0)
        self.hints_ignored = dict.fromkeys(Ignored, 0)

    @property
    def restored_requests(self) -> int:
        return self.hits[HitTier.SSD]

    @property
    def restored_tokens(self) -> int:
        return self.hit_tokens[HitTier.SSD]

    @property
    def recomputed_with_kv(self) -> int:
        return sum(self.recomputed.values())

    def drop(self, reason: Drop, count: int = 1) -> None:
        self.dropped[reason] += count

    def miss(self, reason: Miss) -> None:
        self.missed[reason] += 1

    def as_json(self) -> dict[str, object]:
        return {
            "checkpoints_planned_total": self.planned,
            "checkpoints_captured_total": self.captured,
            "checkpoints_already_stored_total": self.already_stored,
            "output_end_checkpoints_total": self.output_ends,
            "historical_checkpoints_total": {
                f"{tier.name.lower()} {reason.value}": n for (tier, reason), n in self.historical.items()
            },
            "capture_forwards_total": self.forwards,
            "ssd_fault_ins_total": self.fault_ins,
            "ssd_restored_requests_total": self.restored_requests,
            "ssd_restored_tokens_total": self.restored_tokens,
            "internal_hits_total": self.internal_hits,
            "requests_total": self.requests,
            "prompt_tokens_total": self.prompt_tokens,
            "hits_total": {tier.value: n for tier, n in self.hits.items()},
            "hit_tokens_total": {tier.value: n for tier, n in self.hit_tokens.items()},
            "hit_kv_tokens_total": {tier.value: n for tier, n in self.hit_kv_tokens.items()},
            "recomputed_tokens_with_kv_total": self.recomputed_with_kv,
            "recomputed_tokens_by_reason_total": {why.value: n for why, n in self.recomputed.items()},
            "kv_spilled_pages_total": self.kv_spilled_pages,
            "kv_spills_refused_total": self.kv_spills_refused,
            "kv_restores_total": self.kv_restores,
            "kv_restored_pages_total": self.kv_restored_pages,
            "verified_total": self.verified,
            "verify_mismatches_total": self.mismatches,
            "verify_skipped_total": {reason.value: n for reason, n in self.unverified.items()},
            "checkpoints_dropped_total": {reason.value: n for reason, n in self.dropped.items()},
            "ssd_misses_total": {reason.value: n for reason, n in self.missed.items()},
            "intervals_chosen_total": {str(interval): n for interval, n in sorted(self.intervals.items())},
        }
