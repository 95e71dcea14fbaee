"""Dashboard, alerts and scrape configuration: what they ask for exists, and Grafana can lay it out."""

from __future__ import annotations

import yaml

from tests.metric_names import COMMON, ROOT, asked, dashboard, documented, expressions, grouped

LABELS = {row.name: row.labels | COMMON for row in documented()}
ADDED = {"instance", "job"}  # by Prometheus


def test_every_expression_asks_for_metrics_and_labels_that_are_documented() -> None:
    seen = 0
    for where, expression in expressions():
        series = asked(expression)
        assert series, f"{where}: {expression} asks for nothing"
        for one in series:
            if one.name.startswith("sglang:"):
                continue  # held against a live server
            assert one.name in LABELS, f"{where}: there is no {one.name}"
            assert one.labels <= LABELS[one.name] | ADDED, f"{where}: {one.name} has not all of {one.labels}"
        if all(one.name in LABELS for one in series):
            known = set().union(*(LABELS[one.name] for one in series)) | ADDED | {"le"}
            assert grouped(expression) <= known, f"{where}: {expression}"
        seen += 1
    assert seen > 50


def test_most_metrics_are_on_the_dashboard() -> None:
    shown = {one.name for where, text in expressions() if where.startswith("panel") for one in asked(text)}
    assert len(shown & set(LABELS)) >= 0.6 * len(LABELS)


def test_brackets_close() -> None:
    for where, expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), f"{where}: {expression}"


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_grafana_finds_its_data_and_its_dashboards() -> None:
    folder = ROOT / "docker" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "histate.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]
    uids = {panel["datasource"]["uid"] for panel in dashboard()["panels"] if "datasource" in panel}
    assert uids == {"${datasource}"}


def test_prometheus_scrapes_the_server_and_reads_the_alerts() -> None:
    folder = ROOT / "docker" / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["server:30000"]
    assert all((folder / name).is_file() for name in config["rule_files"])


def test_each_alert_leads_to_a_section_of_the_manual() -> None:
    alerts = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
    for rule in (rule for group in alerts["groups"] for rule in group["rules"]):
        document, _, section = rule["annotations"]["manual"].partition(", ")
        assert f"\n## {section}\n" in (ROOT / document).read_text(encoding="utf-8"), rule["alert"]
