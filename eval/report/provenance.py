"""What a reader needs to repeat a run: its command, commit, and the facts that it recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from eval.metrics import Comparison, Run
from eval.report.paths import without_paths

_LONGEST = 1200  # characters of one fact: a list of a thousand events is for tools, not for readers


def run_texts(comparison: Comparison) -> str:
    """Every run: system, commit, command, and its facts; facts that all runs share are told once, first."""
    runs = comparison.runs
    flat = [dict(_flat(run.facts.facts)) for run in runs]
    shared = {
        name: value
        for name, value in flat[0].items()
        if len(runs) > 1 and all(name in other and other[name] == value for other in flat)
    }
    parts = []
    if shared:
        parts.append("Of all runs:\n\n" + _bullets(shared))
    for run, facts in zip(runs, flat, strict=True):
        own = {name: value for name, value in facts.items() if name not in shared}
        parts.append(f"{_head(run)}\n\n{_bullets(own)}".rstrip())
    return without_paths("\n\n".join(parts))


def _head(run: Run) -> str:
    return f"**{run.facts.system}** ({run.path.name}, commit {run.facts.commit})\n\n```\n{run.facts.command}\n```"


def _bullets(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each fact on a line of its own, objects in objects as "outer inner"."""
    pending = list(facts.items())
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, Mapping) and value and len(json.dumps(value)) > 100:
            pending[:0] = [(f"{name} {inner}", one) for inner, one in value.items()]
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        yield name, text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text):,} characters)"
