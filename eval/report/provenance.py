"""What a reader needs to repeat a run: its command, commit, and the facts that it recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eval.metrics import Comparison, Run
from eval.report.paths import without_paths

_LONGEST = 1500  # characters of one fact: all counters of a server are for tools, not for readers


def run_texts(comparison: Comparison) -> str:
    """Every run: system, commit, command, and its facts; facts that all runs share are told once, first."""
    runs = comparison.runs
    first = runs[0].facts.facts
    shared = {
        name: value
        for name, value in first.items()
        if len(runs) > 1 and all(name in run.facts.facts and run.facts.facts[name] == value for run in runs)
    }
    parts = ["Of all runs:\n\n" + _bullets(shared)] if shared else []
    for run in runs:
        own = {name: value for name, value in run.facts.facts.items() if name not in shared}
        parts.append(f"{_head(run)}\n\n{_bullets(own)}".rstrip())
    return without_paths("\n\n".join(parts))


def _head(run: Run) -> str:
    return f"**{run.facts.system}** ({run.path.name}, commit {run.facts.commit})\n\n```\n{run.facts.command}\n```"


def _bullets(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_shown(value)}" for name, value in facts.items())


def _shown(value: Any) -> str:
    text = _text(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} ... ({len(text):,} characters, whole in the records file)"


def _text(value: Any) -> str:
    """JSON as words: "name value, name value", inner objects in brackets."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        inner = (
            f"{name} ({_text(one)})" if isinstance(one, Mapping) else f"{name} {_text(one)}"
            for name, one in value.items()
        )
        return ", ".join(inner) or "none"
    return json.dumps(value)
