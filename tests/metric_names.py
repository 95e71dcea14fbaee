"""What documents and dashboards say about metrics, for the tests that hold it against the code and a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMMON = frozenset({"model_name", "dp_rank", "tp_rank"})
"""Labels of every metric of HiState."""
SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Row:
    """One row of the table in docs/metrics.md."""

    name: str
    type: str
    labels: frozenset[str]
    each_rank: bool
    meaning: str


def documented() -> list[Row]:
    rows = []
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `histate_"):
            name, kind, labels, ranks, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            assert ranks in ("one", "each"), line
            found = frozenset(re.findall(r"`(\w+)`", labels))
            rows.append(Row(name.strip("`"), kind, found, ranks == "each", meaning))
    return rows


def dashboard() -> dict[str, Any]:
    found = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "histate.json").read_text())
    assert isinstance(found, dict)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Yield what each panel, alert and example asks for, with where it stands."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    alerts = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if (line.startswith("| ") and "rate(" in line) or "group_left" in line:
            yield "docs/metrics.md", line.rsplit("`", 2)[1]


@dataclass(frozen=True)
class Asked:
    """A series that an expression asks for: a metric's name without suffix, and the labels that are named with it."""

    name: str
    labels: frozenset[str]


def asked(expression: str) -> list[Asked]:
    """Return the series in `expression`, with the labels of their selectors."""
    found = []
    # Prometheus gets SGLang's names with a colon or, by its OpenMetrics, with an underscore.
    plain = re.sub(r'\{__name__=~"sglang\[:_\](\w+)",?', r"sglang:\1{", expression)
    for name, selector in re.findall(r"\b((?:histate_|sglang:)\w+)(\{[^}]*\})?", plain):
        base = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        found.append(Asked(base, frozenset(re.findall(r"(\w+)\s*[=!]", selector))))
    return found


def grouped(expression: str) -> set[str]:
    """Return the labels that `expression` groups by."""
    return {
        label.strip()
        for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
        for label in labels.split(",")
        if label.strip()
    }
