"""What is printed when all runs have ended: the table, ratios, and what the times depend on."""

from __future__ import annotations

from statistics import median
from typing import Any

from eval.metrics import Comparison, Ratio, Run, ratios, text_table

_FIRST = "histate"


def outcome(comparison: Comparison) -> str:
    """Return the table, every system's ratios to HiState, and each run by its place in its round."""
    parts = [text_table(comparison), *_ratios(comparison), *_places(comparison)]
    warnings = [
        f"warning: {run.path.name}: {problem}"
        for run in comparison.runs
        for problem in problems(run.facts.facts)
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(warnings)) if part)


def problems(facts: dict[str, Any]) -> list[str]:
    """Return what makes a run's figures doubtful."""
    found = []
    if facts.get("unequal_bytes"):
        found.append(f"the server holds other bytes than asked for, {facts['unequal_bytes']}")
    if facts.get("hits_beyond_bound"):
        found.append(f"{facts['hits_beyond_bound']} requests hit more than an infinite cache was said to")
    if facts.get("resumed_requests"):
        found.append(f"resumed with empty caches after {facts['resumed_requests']} requests")
    if str(facts.get("page_cache", "dropped")) != "dropped":
        found.append(f"page cache {facts['page_cache']}")
    if not facts.get("complete"):
        found.append("not complete")
    return found


def _ratios(comparison: Comparison) -> list[str]:
    others = [name for name in comparison.systems if name != _FIRST]
    if _FIRST not in comparison.systems or not others:
        return []
    lines = [
        f"TTFT of the other over {_FIRST}'s (above 1: {_FIRST} is faster), 95 % by drawing sessions again"
    ]
    for name in others:
        found = ratios(comparison, _FIRST, name)
        lines.append(
            f"  {name}: "
            + ", ".join(f"{column} {_shown(found[column])}" for column in ("p50", "p99", "mean"))
        )
    return ["\n".join(lines)]


def _shown(ratio: Ratio) -> str:
    if ratio.value is None:
        return "-"
    span = f" ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})" if ratio.interval else ""
    return f"{ratio.value:.2f}{span}"


def _places(comparison: Comparison) -> list[str]:
    lines = ["Each run (a server that starts second may be faster whatever it is)"]
    for run in comparison.runs:
        lines.append(f"  {run.path.name}: {_place(run)}")
    return ["\n".join(lines)]


def _place(run: Run) -> str:
    facts = run.facts.facts
    times = [record.ttft_s for record in run.good]
    load = facts.get("load") or {}
    parts = [
        f"place {facts.get('position', '-')} of round {facts.get('round', '-')}",
        f"TTFT p50 {median(times):.3f} s" if times else "no request went well",
        f"{facts.get('mean_in_flight', '-')} requests in flight on average",
        f"sent late by {facts.get('sent_late_p99_s', '-')} s at p99",
        f"machine load {load.get('before', '-')} to {load.get('after', '-')}",
    ]
    return ", ".join(parts)
