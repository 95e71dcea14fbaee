"""The way of the figures to Prometheus: everything from the start, nothing twice, no counter that goes down."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang_histate.adapter.counters import Drop, Miss, Why
from sglang_histate.adapter.metric import Figures, Kind
from sglang_histate.adapter.metric_table import METRICS
from sglang_histate.adapter.metrics import INTERVAL_S, MetricsExport, metrics_as_json
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.policy_time import Part, PolicyTime
from sglang_histate.store import DropReason, LossReason, MissReason, PutResult, RecordKind
from tests.metric_names import COMMON, documented

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import fake_disk, put, wait_threads
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

LABELS = {"model_name": "m", "dp_rank": "0", "tp_rank": "0"}
INTERVALS = [256, 512, 0]


class Shown:
    """A rank and what Prometheus knows of it."""

    def __init__(self, *, first_rank: bool = True, **settings: Any) -> None:
        self.rank = Rank(Alone(), **settings)
        facts = {"kv_bytes_per_token": 64, "checkpoint_bytes": 100, "checkpoint_stored_bytes": 90}
        self.rank.engine.cache.status_facts = {**facts, "config": {"intervals": INTERVALS}}
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self.export = MetricsExport(
            METRICS,
            lambda: Figures.of(self.rank.engine.cache),
            LABELS,
            first_rank=first_rank,
            registry=self.registry,
            clock=lambda: self.now_s,
        )

    def close(self) -> None:
        self.rank.store.close()

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return the published values by name and labels, those that every series has left out."""
        return {
            (
                sample.name,
                tuple(sorted((k, v) for k, v in sample.labels.items() if k not in LABELS)),
            ): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, tuple(sorted(labels.items()))]

    def families(self) -> dict[str, Any]:
        return {
            family.name + "_total" * (family.type == "counter"): family for family in self.registry.collect()
        }


@pytest.fixture
def shown():
    made = Shown()
    yield made
    made.close()


def test_the_manual_has_every_metric_as_it_is() -> None:
    wanted = [
        (metric.name, metric.kind.value, frozenset(metric.labels), metric.each_rank, metric.help)
        for metric in METRICS
    ]
    found = [(row.name, row.type, row.labels, row.each_rank, row.meaning) for row in documented()]
    assert found == wanted
    assert len({name for name, *_ in wanted}) == len(wanted)


def test_everything_is_there_from_the_start(shown) -> None:
    families = shown.families()
    assert set(families) == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert family.type == metric.kind and family.documentation == metric.help
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == COMMON | set(metric.labels), sample
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            if metric.kind is not Kind.GAUGE and not sample.name.endswith("_created"):
                assert sample.value == 0, sample


def words(shown: Shown, metric: str, label: str) -> set[str]:
    return {dict(labels)[label] for name, labels in shown.samples() if name == metric}


def test_every_reason_is_there_from_the_start(shown) -> None:
    for metric, label, reasons in (
        ("histate_recomputed_tokens_total", "reason", Why),
        ("histate_ssd_misses_total", "reason", Miss),
        ("histate_checkpoints_dropped_total", "reason", Drop),
        ("histate_ssd_puts_total", "result", PutResult),
        ("histate_ssd_entries_dropped_total", "reason", DropReason),
        ("histate_ssd_read_misses_total", "reason", MissReason),
        ("histate_recovery_dropped_entries", "reason", LossReason),
        ("histate_ssd_reads_total", "kind", RecordKind),
        ("histate_policy_seconds_total", "part", Part),
    ):
        assert words(shown, metric, label) == {reason.value for reason in reasons}, metric
    assert words(shown, "histate_intervals_chosen_total", "interval") == {str(i) for i in INTERVALS}


def test_other_ranks_tell_only_what_is_their_own() -> None:
    second = Shown(first_rank=False)
    assert set(second.families()) == {metric.name for metric in METRICS if metric.each_rank}
    second.close()


def test_what_happens_is_published_once_a_second(shown) -> None:
    rank = shown.rank
    shown.export.tick()
    rank.prefill(request(tokens((1, 600))), 0, 600)
    rank.drain()
    shown.now_s = INTERVAL_S / 2
    shown.export.tick()
    assert shown.value("histate_checkpoints_captured_total") == 0
    shown.now_s = INTERVAL_S
    shown.export.tick()
    assert shown.value("histate_checkpoints_planned_total") == 3
    assert shown.value("histate_checkpoints_captured_total") == 3
    assert shown.value("histate_ssd_puts_total", kind="checkpoint", result="stored") == 3
    assert shown.value("histate_ssd_entries", kind="checkpoint") == 3
    assert shown.value("histate_intervals_chosen_total", interval="256") == 1
    assert (
        shown.value("histate_tier_used_bytes", tier="ssd", kind="states") == 3 * rank.store.layout.slab_bytes
    )
    assert shown.value("histate_requests_total") == 1 and shown.value("histate_prompt_tokens_total") == 600
    assert shown.value("histate_ssd_write_seconds_count", kind="checkpoint") == 3
    shown.export.publish()
    assert shown.value("histate_checkpoints_planned_total") == 3, "nothing is counted twice"


def test_a_count_that_would_go_down_stays(shown) -> None:
    shown.rank.counters.planned = 5
    shown.export.publish()
    shown.rank.counters.planned = 3
    shown.export.publish()
    assert shown.value("histate_checkpoints_planned_total") == 5
    shown.rank.counters.planned = 7
    shown.export.publish()
    assert shown.value("histate_checkpoints_planned_total") == 7


def plain(found: Any) -> dict[str, float]:
    """Return the numbers of a status by path; a distribution's are its count."""
    if isinstance(found, dict):
        if "buckets" in found:
            return {"count": found["count"]}
        return {f"{name}/{rest}": n for name, part in found.items() for rest, n in plain(part).items()}
    return {"": float("inf") if found is None else found}


@pytest.mark.parametrize("seed", range(4))
def test_no_counter_goes_down_and_nothing_is_negative(seed: int) -> None:
    """A life of prompts, rewrites, failures, aborts, flushes and purges, looked at after each step."""
    source = random.Random(seed)
    shown = Shown(slabs=6, buffers=6)
    rank, engine = shown.rank, shown.rank.engine
    before: dict[Any, float] = {}
    flushes = 0
    for step in range(60):
        length = source.randrange(1, 10) * PAGE
        ids = tokens((source.randrange(3), length))
        what = source.choice(
            ("insert", "prefill", "prefill", "rewrite", "rewrite", "fault", "flush", "drop", "evict")
        )
        if what == "insert":
            try:
                engine.insert(ids)
            except MemoryError:
                engine.evict_kv(2048)
        elif what == "prefill":
            req = request(ids)
            rank.prefill(req, 0, length)
            if source.random() < 0.3:
                rank.tier.released(req)
        elif what == "rewrite":
            req = request(ids + tokens((100 + step, 30)))
            for _ in range(3):
                if engine.cache.request_ready(req):
                    break
                wait_threads(rank.store)
                rank.tier.tick()
            req.init_next_round_input(engine.cache, cow_mamba=False)
            rank.tier.request_planned(req)
            if source.random() < 0.5:
                rank.tier.fault_ins.cancel(req.cache_request_handle)
        elif what == "fault":
            faults = fake_disk(rank.store)
            source.choice((faults.read_faults, faults.write_faults)).append("eio")
        elif what == "drop":
            rank.store.purge(None)
        elif what == "evict":
            engine.evict_kv(length)
        elif what == "flush":
            rank.drain()
            engine.cache.reset()
            engine.kv.clear()
            engine.states.clear()
            flushes += 1
        if source.random() < 0.7:
            wait_threads(rank.store)
            rank.tier.tick()
        engine.settle()
        shown.export.publish()
        after = shown.samples()
        assert set(before) <= set(after)
        for key, value in after.items():
            assert value >= 0, (what, key, value)
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert value >= before.get(key, 0), (what, key)
        before = after
        status = metrics_as_json(METRICS, Figures.of(engine.cache))
        assert all(value >= 0 for value in plain(status).values())
    assert flushes and sum(rank.counters.intervals.values())
    rank.drain()
    shown.close()


def test_the_status_has_the_same_figures(shown) -> None:
    rank = shown.rank
    rank.prefill(request(tokens((1, 600))), 0, 600)
    rank.drain()
    key = PageKeys(PAGE, None, None).at(tokens((2, 64)), 64)
    put(rank.store, rank.engine.layout, key, 64, 1.0)
    rank.drain()
    shown.export.publish()
    status = metrics_as_json(METRICS, Figures.of(rank.engine.cache))
    assert set(status) == {metric.name for metric in METRICS}
    samples = shown.samples()
    compared: Counter[str] = Counter()
    for metric in METRICS:
        found = status[metric.name]
        for labels, value in found.items() if metric.labels else [("", found)]:
            named = tuple(sorted(tuple(part.split("=", 1)) for part in labels.split(",") if part))
            if metric.kind is Kind.HISTOGRAM:
                assert samples[metric.name + "_count", named] == value["count"]
                assert samples[metric.name + "_sum", named] == pytest.approx(value["sum"])
                for bound, count in value["buckets"].items():
                    with_bound = tuple(sorted((*named, ("le", bound))))
                    assert samples[metric.name + "_bucket", with_bound] == count
            else:
                assert samples[metric.name, named] == (float("inf") if value is None else value)
            compared[metric.kind] += 1
    assert compared[Kind.COUNTER] > 100 and compared[Kind.GAUGE] > 40 and compared[Kind.HISTOGRAM] == 11


def test_times_are_told_as_they_are_observed(shown) -> None:
    shown.rank.counters.fault_in_s.add(0.003)
    shown.rank.counters.fault_in_s.add(40.0)
    assert shown.value("histate_fault_in_seconds_count") == 2
    assert shown.value("histate_fault_in_seconds_sum") == pytest.approx(40.003)
    assert shown.value("histate_fault_in_seconds_bucket", le="0.005") == 1
    assert shown.value("histate_fault_in_seconds_bucket", le="30.0") == 1


def test_a_request_waits_in_the_queue_and_for_its_read(shown, monkeypatch) -> None:
    rank, now_s = shown.rank, [100.0]
    monkeypatch.setattr(rank.tier.accounting, "_clock", lambda: now_s[0])
    ids = tokens((1, 1024))
    rank.engine.insert(ids)
    rank.engine.settle()
    put(rank.store, rank.engine.layout, PageKeys(PAGE, None, None).at(ids, 512), 512, 1.0)
    rank.drain()
    req = request(tokens((1, 600), (2, 100)))
    rank.engine.cache.request_arrived(req)
    now_s[0] += 0.5
    assert not rank.engine.cache.request_ready(req)
    now_s[0] += 2.0
    wait_threads(rank.store)
    rank.tier.tick()
    assert rank.engine.cache.request_ready(req)
    now_s[0] += 0.25
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    rank.tier.request_planned(req)
    assert shown.value("histate_read_wait_seconds_sum") == 2.0
    assert shown.value("histate_queue_seconds_sum") == 2.75
    assert shown.value("histate_fault_in_seconds_count") == 1
    assert shown.value("histate_ssd_read_seconds_count", kind="checkpoint") == 1


def test_health_checks_are_no_requests(shown) -> None:
    req = request(tokens((1, 20)))
    req.rid = "HEALTH_CHECK_1"
    shown.rank.engine.cache.request_arrived(req)
    shown.rank.prefill(req, 0, 20)
    shown.export.publish()
    assert shown.value("histate_requests_total") == shown.value("histate_queue_seconds_count") == 0


def test_time_of_the_policy_is_that_of_the_outermost_call() -> None:
    now = iter(range(100))
    spent = PolicyTime(lambda: float(next(now)))
    inner = lambda: spent.run(Part.EVICT, lambda: None)  # noqa: E731
    spent.run(Part.TICK, inner)
    assert spent.seconds[Part.TICK] == 1.0 and spent.seconds[Part.EVICT] == 0.0
    with pytest.raises(ZeroDivisionError):
        spent.run(Part.PLAN, lambda: 1 / 0)
    spent.run(Part.EVICT, lambda: None)
    assert spent.seconds[Part.PLAN] == spent.seconds[Part.EVICT] == 1.0


def test_the_scheduler_thread_is_timed(shown) -> None:
    rank = shown.rank
    rank.prefill(request(tokens((1, 600))), 0, 600)
    rank.engine.cache.request_ready(request(tokens((1, 100))))
    rank.engine.insert(tokens((3, 640)))
    rank.engine.settle()
    rank.engine.evict_kv(640)
    rank.engine.cache.check_hicache_events()
    seconds = rank.engine.ranking.policy_time.seconds
    assert all(seconds[part] > 0 for part in (Part.PLAN, Part.LOOKUP, Part.TICK, Part.EVICT))


def test_a_fault_in_a_metric_does_not_reach_the_scheduler(caplog) -> None:
    shown = Shown()
    try:
        figures, shown.export._figures = shown.export._figures, lambda: 1 // 0
        for _ in range(3):
            shown.now_s += 1.0
            shown.export.tick()
        assert sum("publishing metrics failed" in record.message for record in caplog.records) == 1
        shown.export._figures = figures
        shown.rank.counters.requests += 7
        shown.now_s += 1.0
        shown.export.tick()
        assert shown.samples()["histate_requests_total", ()] == 7
    finally:
        shown.close()
