"""Reuse-sensitive requests: those where the caching policy matters, as the HiState paper defines them.

A request is one if at least one of two things is so:
1. the baseline's hit rate is at least 5 points below the infinite cache's (`Record.reusable`);
2. the hit rates of HiState and of the baseline differ by at least 5 points, in either direction.

The paper's baseline is vLLM with offload to CPU and disk: `vllm-disk` in simulation. The real engine has no such
system: there it is a run that the caller names, `hicache` by default, so the two sets are not the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.metrics.runs import Comparison, Key, Run

DEFAULT_BASELINE = {"simulation": "vllm-disk", "engine": "hicache"}
CANDIDATE = "histate"
_ONE_IN = 20  # 5 points are one part in twenty


@dataclass(frozen=True)
class Sensitive:
    """`keys`: the requests, None if there is no run of the baseline. `rule`: in words, for the reader of a table."""

    keys: frozenset[Key] | None
    baseline: str
    rule: str


@dataclass
class _Total:
    """Sums over the repeats of one request."""

    hit: int = 0
    reusable: int = 0
    prompt: int = 0
    runs: int = 0


def baseline_name(source: str, named: str | None = None) -> str:
    """Return the named baseline, or the source's own."""
    return named or DEFAULT_BASELINE.get(source, DEFAULT_BASELINE["engine"])


def sensitive(comparison: Comparison, baseline: str | None = None) -> Sensitive:
    """Find the reuse-sensitive requests among those that did not fail in the baseline (and in HiState).

    Repeats count by their mean. Whole numbers are compared, so a difference of exactly 5 points counts.
    """
    name = baseline_name(comparison.source, baseline)
    if name not in comparison.systems:
        return Sensitive(None, name, f"not known: there is no run of the baseline, {name}")
    base = _totals(comparison.systems[name])
    ours = _totals(comparison.systems.get(CANDIDATE, ()))
    keys = set()
    for key, total in base.items():
        if not total.prompt:
            continue
        if _ONE_IN * (total.reusable - total.hit) >= total.prompt:
            keys.add(key)
        elif (other := ours.get(key)) is not None:
            prompt = total.prompt // total.runs
            apart = abs(other.hit * total.runs - total.hit * other.runs)
            if _ONE_IN * apart >= prompt * total.runs * other.runs:
                keys.add(key)
    rule = f"{name}'s hit rate is at least 5 points below the infinite cache's"
    if CANDIDATE not in comparison.systems:
        rule += f" (the second condition needs a run of {CANDIDATE}: there is none)"
    elif name != CANDIDATE:
        rule += f", or differs from {CANDIDATE}'s by at least 5 points"
    if comparison.source == "engine":
        rule += f"; the paper's baseline is vLLM's disk offload, here it is {name}"
    return Sensitive(frozenset(keys), name, rule)


def _totals(runs: Sequence[Run]) -> dict[Key, _Total]:
    found: dict[Key, _Total] = {}
    for run in runs:
        for record in run.good:
            total = found.setdefault(record.key, _Total())
            total.hit += record.hit
            total.reusable += record.reusable
            total.prompt += record.prompt_tokens
            total.runs += 1
    return found
