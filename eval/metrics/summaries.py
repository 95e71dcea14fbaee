"""`summary.json`: the figures of one workload in the form that checks and other tools read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.metrics.runs import Run, compare
from eval.metrics.sensitivity import sensitive
from eval.metrics.system_figures import Part, SystemFigures, figures


def summary(runs: Sequence[Run], baseline: str | None = None) -> dict[str, Any]:
    """Return the summary of runs of one workload; a figure that is not known is None.

    `{"commit", "workload", "systems": {name: {"requests", "hit_rate", "reusable_share", "ttft_mean_s", "ttft_p50_s",
    "ttft_p95_s", "ttft_p99_s", "sensitive": {the same seven}, "recomputed_with_kv_tokens", "ssd_written_bytes",
    "makespan_s", "errors"}}}`. Rates are shares of 1. "requests" has the failed ones in it, which have no part in the
    other figures; in "sensitive" it has not. Over the repeats of a system "requests", "errors" and
    "recomputed_with_kv_tokens" are sums, "ssd_written_bytes" and "makespan_s" means (see `SystemFigures`). All of "sensitive" is None without a run of the baseline (`baseline`, or
    `vllm-disk` in simulation and `hicache` on the engine).

    Raises:
        NotComparable: see `compare`.
    """
    comparison = compare(runs)
    found = figures(comparison, sensitive(comparison, baseline))
    return {
        "commit": comparison.commit,
        "workload": comparison.workload,
        "systems": {name: _system(one) for name, one in found.items()},
    }


def merged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first summary with the others, whole, in a list under "others": the form of one stays readable.

    Raises:
        ValueError: there is none.
    """
    if not summaries:
        raise ValueError("no summary to merge: name at least one")
    return {**summaries[0], "others": list(summaries[1:])}


def _system(one: SystemFigures) -> dict[str, Any]:
    return {
        **_part(one.all),
        "requests": one.requests,
        "sensitive": dict.fromkeys(_part(one.all)) if one.sensitive is None else _part(one.sensitive),
        "recomputed_with_kv_tokens": one.all.recomputed_with_kv,
        "ssd_written_bytes": one.ssd_written_bytes,
        "makespan_s": one.makespan_s,
        "errors": one.errors,
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "requests": part.requests,
        "hit_rate": part.hit_rate,
        "reusable_share": part.reusable_share,
        "ttft_mean_s": part.ttft.mean,
        "ttft_p50_s": part.ttft.p50,
        "ttft_p95_s": part.ttft.p95,
        "ttft_p99_s": part.ttft.p99,
    }
