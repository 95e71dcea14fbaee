"""95 % intervals by resampling sessions: the turns of one session are not independent, sessions are taken to be.

A resample draws as many sessions as there are, with replacement, and takes all requests of each. A ratio of two
systems is paired: both use the same drawn sessions, and only requests that neither lacks. Same seed, same intervals.
What these intervals do not have in them: that sessions of one run compete for the same memory, and noise between
runs of one workload; repeats show the latter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.metrics.runs import Comparison, Key, Run
from eval.metrics.spread import COLUMNS, statistics
from eval.records import Record

RESAMPLES = 1000
SEED = 1
_BOUNDS = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """From `low` to `high` lie 95 % of the resamples."""

    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """The baseline's TTFT over this system's (above 1: this system is faster), or another quotient; `requests` pairs."""

    value: float | None
    interval: Interval | None
    requests: int


def intervals(
    runs: Sequence[Run], keys: Collection[Key] | None = None, *, resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, Interval | None]:
    """Intervals of one system's TTFT ("mean", "p50", "p95", "p99", seconds), "hit_rate" and "reusable_share".

    `keys`: only these requests. All are None for fewer than two sessions: one session tells nothing of others.
    """
    records = _good(runs, keys)
    sessions = _numbers(records)
    if len(sessions) < 2:
        return dict.fromkeys((*COLUMNS, "hit_rate", "reusable_share"))
    draws = draw_sessions(len(sessions), resamples, seed)
    times = _resampled(records, sessions, draws)
    found = {name: interval_of(times[:, column]) for column, name in enumerate(COLUMNS)}
    index = np.array([sessions[record.session] for record in records])
    for name, above, below in (
        ("hit_rate", [r.hit for r in records], [r.prompt_tokens for r in records]),
        ("reusable_share", [min(r.hit, r.reusable) for r in records], [r.reusable for r in records]),
    ):
        some = np.bincount(index, weights=above, minlength=len(sessions))
        of = np.bincount(index, weights=below, minlength=len(sessions))
        weights = draws.astype(np.float64)
        found[name] = interval_of(_quotient(weights @ some, weights @ of))
    return found


def ratios(
    comparison: Comparison,
    system: str,
    baseline: str,
    keys: Collection[Key] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, Ratio]:
    """The baseline's TTFT over the system's, by "mean", "p50", "p95" and "p99", paired by session.

    `keys`: only these requests. Of each request that both have as many repeats are taken as the one with fewer has.

    Raises:
        KeyError: the comparison has no such system.
    """
    ours, theirs = _pairs(comparison.systems[system], comparison.systems[baseline], keys)
    if not ours:
        return {name: Ratio(None, None, 0) for name in COLUMNS}
    sessions = _numbers(ours)
    whole = np.ones((1, len(sessions)), dtype=np.int64)
    value = _quotient(_resampled(theirs, sessions, whole), _resampled(ours, sessions, whole))[0]
    spans: list[Interval | None] = [None] * len(COLUMNS)
    if len(sessions) > 1:
        draws = draw_sessions(len(sessions), resamples, seed)
        drawn = _quotient(_resampled(theirs, sessions, draws), _resampled(ours, sessions, draws))
        spans = [interval_of(drawn[:, column]) for column in range(len(COLUMNS))]
    return {
        name: Ratio(None if np.isnan(value[column]) else float(value[column]), spans[column], len(ours))
        for column, name in enumerate(COLUMNS)
    }


def _good(runs: Sequence[Run], keys: Collection[Key] | None) -> list[Record]:
    return [record for run in runs for record in run.good if keys is None or record.key in keys]


def _pairs(
    first: Sequence[Run], second: Sequence[Run], keys: Collection[Key] | None
) -> tuple[list[Record], list[Record]]:
    """Records of both, the same requests equally often."""
    by_key: tuple[dict[Key, list[Record]], dict[Key, list[Record]]] = ({}, {})
    for runs, found in zip((first, second), by_key, strict=True):
        for record in _good(runs, keys):
            found.setdefault(record.key, []).append(record)
    ours, theirs = [], []
    for key in sorted(by_key[0].keys() & by_key[1].keys()):
        for mine, other in zip(by_key[0][key], by_key[1][key], strict=False):
            ours.append(mine)
            theirs.append(other)
    return ours, theirs


def _numbers(records: Sequence[Record]) -> dict[str, int]:
    return {session: number for number, session in enumerate(sorted({record.session for record in records}))}


def draw_sessions(sessions: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """How often each session is in each resample: shape [resamples, sessions], rows add up to `sessions`."""
    equal = np.full(sessions, 1 / sessions)
    return np.random.default_rng(seed).multinomial(sessions, equal, size=resamples).astype(np.int64)


def _resampled(
    records: Sequence[Record], sessions: dict[str, int], draws: NDArray[np.int64]
) -> NDArray[np.float64]:
    """`COLUMNS` of the TTFT (seconds) in each resample: shape [resamples, 4]."""
    times = np.array([record.ttft_s for record in records])
    index = np.array([sessions[record.session] for record in records])
    order = np.argsort(times, kind="stable")
    times, index = times[order], index[order]
    # Repeating sorted values leaves them sorted: no resample is sorted again.
    return np.stack([statistics(np.repeat(times, counts[index])) for counts in draws])


def _quotient(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """Element by element, NaN where the lower one is 0."""
    quotient = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=quotient, where=below != 0)
    return quotient


def interval_of(values: NDArray[np.float64]) -> Interval | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.percentile(known, _BOUNDS)
    return Interval(float(low), float(high))
