"""GET /metrics of a live server: the table in the manual, the dashboard, and the status agree with it."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eval.servers import Server
from tests.metric_names import COMMON, asked, documented, expressions

from .tools import PAGE, cached, random_tokens

pytestmark = pytest.mark.server

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def families(server: Server) -> dict[str, Any]:
    """Return the metrics by their full name, as a scrape finds them."""
    found = text_string_to_metric_families(server.get("/metrics"))
    return {family.name + "_total" * (family.type == "counter"): family for family in found}


def samples(server: Server) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for name, family in families(server).items()
        if name.startswith("histate_")
        for sample in family.samples
    }


def published(server: Server) -> Samples:
    """Return the samples once what has happened so far is published."""
    server.settle()
    time.sleep(2.5)
    return samples(server)


def value(found: Samples, name: str, **labels: str) -> float:
    wanted = {*labels.items()}
    return sum(n for (one, have), n in found.items() if one == name and wanted <= set(have))


def test_the_table_in_the_manual_is_what_a_scrape_finds(main: Server) -> None:
    live = {name: family for name, family in families(main).items() if name.startswith("histate_")}
    rows = {row.name: row for row in documented()}
    assert set(live) == set(rows)
    for name, row in rows.items():
        assert live[name].type == row.type, name
        assert live[name].documentation == row.meaning, name
        for sample in live[name].samples:
            assert set(sample.labels) - {"le"} == row.labels | COMMON, sample


def test_dashboard_and_alerts_ask_for_what_is_there(main: Server) -> None:
    main.generate(random_tokens(200, "dashboard"), 4)
    live = families(main)
    for where, expression in expressions():
        for one in asked(expression):
            assert one.name in live, f"{where}: {one.name} is not in /metrics"
            labels = {label for sample in live[one.name].samples for label in sample.labels}
            assert one.labels <= labels | {"instance", "job"}, f"{where}: {one}"


def test_names_are_the_same_in_openmetrics(main: Server) -> None:
    """Which is what Prometheus asks for. SGLang's own names lose their colon there."""
    request = urllib.request.Request(
        main.url + "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    found = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
    ours = {name for name in found if name.startswith("histate_")}
    assert ours == {name for name, _ in samples(main)}
    assert {name for name in found if name.startswith("sglang")}


def test_hits_misses_and_captures_are_counted(main: Server) -> None:
    """A context, a rewrite of it, and a rewrite where nothing was captured: the counters tell them apart."""
    before = published(main)
    context = random_tokens(4096, "metrics")
    main.generate(context, 1)
    captured = published(main)
    rewrite = main.generate(context[:3000] + random_tokens(50, "metrics rewrite"), 1)
    resumed = published(main)

    def moved(name: str, first: Samples, then: Samples, **labels: str) -> float:
        return value(then, name, **labels) - value(first, name, **labels)

    assert moved("histate_requests_total", before, captured) == 1
    assert moved("histate_prompt_tokens_total", before, captured) == len(context)
    assert moved("histate_checkpoints_captured_total", before, captured) > 4
    assert moved("histate_ssd_puts_total", before, captured, result="stored") > 4
    assert moved("histate_hits_total", before, captured) == 0
    assert moved("histate_hits_total", captured, resumed, tier="ssd") == 1
    assert moved("histate_hit_tokens_total", captured, resumed, tier="ssd") == cached(rewrite) > 0
    assert moved("histate_internal_hits_total", captured, resumed) == 1
    assert moved("histate_fault_in_seconds_count", captured, resumed) == 1
    assert moved("histate_ssd_read_seconds_count", captured, resumed, kind="checkpoint") == 1
    lost = 3000 // PAGE * PAGE - cached(rewrite)
    assert moved("histate_recomputed_tokens_total", captured, resumed, reason="not_captured") == lost
    assert moved("histate_recomputed_tokens_total", captured, resumed) == lost
    assert moved("histate_policy_seconds_total", before, resumed) > 0
    assert value(resumed, "histate_tier_used_bytes", tier="ssd", kind="states") > 0
    assert value(resumed, "histate_ranks_agree") == 1 and value(resumed, "histate_quarantined") == 0


def test_no_counter_goes_down_over_a_flush(main: Server) -> None:
    main.generate(random_tokens(1000, "flushed"), 1)
    before = published(main)
    main.flush()
    after = published(main)
    assert set(before) == set(after)
    for key, count in before.items():
        assert after[key] >= 0
        if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
            assert after[key] >= count, key
    assert value(after, "histate_tier_used_bytes", tier="ssd") == 0


def test_the_status_has_the_same_figures(main: Server) -> None:
    main.generate(random_tokens(1500, "status"), 1)
    found = published(main)
    status = main.status()["metrics"]
    assert set(status) == {row.name for row in documented()}
    for row in documented():
        # What goes on while nothing happens: clocks, and the bytes that the write limits give back.
        if row.type == "histogram" or row.name in (
            "histate_policy_seconds_total",
            "histate_write_budget_bytes",
        ):
            continue
        values = status[row.name] if row.labels else {"": status[row.name]}
        for labels, number in values.items():
            wanted = dict(part.split("=", 1) for part in labels.split(",") if part)
            assert value(found, row.name, **wanted) == (float("inf") if number is None else number), (
                row.name,
                labels,
            )
