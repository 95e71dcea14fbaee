"""The figures of one system: what it hit, what it computed again, and how long its requests waited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from eval.metrics.runs import Comparison, Key, Run
from eval.metrics.sensitivity import Sensitive
from eval.metrics.spread import Spread, spread
from eval.records import TIERS, Record

# In `RunFacts.facts`; absent or None where a system does not tell.
SSD_WRITTEN = "ssd_written_bytes"
WITH_KV = "recomputed_with_kv_tokens"  # of a whole run, from a server that tells it of no single request


@dataclass(frozen=True)
class Part:
    """Figures of some of a system's requests, none of which failed; rates are shares of 1, None of nothing.

    `hit_rate`: prompt tokens not computed again, of all prompt tokens; `tier_rates` the same by tier of the KV.
    `reusable_share`: sum of min(hit, reusable) over sum of reusable, the part of what the infinite cache would reuse.
    `recomputed_with_kv`: tokens computed again although their KV was there; None if any request does not tell.
    """

    requests: int
    prompt_tokens: int
    hit_rate: float | None
    tier_rates: dict[str, float | None]
    reusable_share: float | None
    recomputed_with_kv: int | None
    ttft: Spread


@dataclass(frozen=True)
class SystemFigures:
    """All figures of one system, over all its runs (repeats).

    What requests have is put together: requests, errors, missing ones and tokens are sums over the repeats, rates and
    times are over the requests of all of them. What a run has as a whole, makespan and bytes written, is the mean over
    the repeats.

    `all`: its `recomputed_with_kv` is the servers' own count where no request tells, None in the other parts then.
    `later`: all but each session's first request. `sensitive`: None without a baseline. `rewriting`: requests that
    leave the path of the session's earlier turns. `itl`: seconds between tokens, mean over tokens, percentiles over
    requests. `makespan_s`: from the start to the last token, `ssd_written_bytes` from the facts. `missing`: requests of
    other runs that these lack (a run that ended early).
    """

    system: str
    runs: int
    requests: int
    errors: int
    missing: int
    all: Part
    later: Part
    sensitive: Part | None
    rewriting: Part
    itl: Spread
    end_to_end: Spread
    makespan_s: float | None
    ssd_written_bytes: int | None


def figures(comparison: Comparison, chosen: Sensitive) -> dict[str, SystemFigures]:
    """Return each system's figures, in the order of tables."""
    first, every = first_requests(comparison), comparison.keys
    return {name: _system(name, runs, first, every, chosen.keys) for name, runs in comparison.systems.items()}


def part(records: Sequence[Record]) -> Part:
    """Return the figures of requests that did not fail."""
    prompt = sum(record.prompt_tokens for record in records)
    reusable = sum(record.reusable for record in records)
    again = [record.recomputed_with_kv for record in records]
    return Part(
        requests=len(records),
        prompt_tokens=prompt,
        hit_rate=_share(sum(record.hit for record in records), prompt),
        tier_rates={
            tier: _share(sum(record.restored.get(tier, 0) for record in records), prompt) for tier in TIERS
        },
        reusable_share=_share(sum(min(record.hit, record.reusable) for record in records), reusable),
        recomputed_with_kv=None if not again or None in again else sum(one or 0 for one in again),
        ttft=spread(record.ttft_s for record in records),
    )


def first_requests(comparison: Comparison) -> frozenset[Key]:
    """Each session's first request: the lowest turn of its own list (sub-agents start later)."""
    lowest: dict[str, Key] = {}
    for key in comparison.keys:
        if key[0] not in lowest or key < lowest[key[0]]:
            lowest[key[0]] = key
    return frozenset(lowest.values())


def _system(
    name: str, runs: Sequence[Run], first: frozenset[Key], every: frozenset[Key], keys: frozenset[Key] | None
) -> SystemFigures:
    good = [record for run in runs for record in run.good]
    total = sum(len(run.records) for run in runs)
    gaps = [(record.end_s - record.first_token_s, record.output_tokens - 1) for record in good]
    gaps = [(seconds, tokens) for seconds, tokens in gaps if tokens > 0]
    itl = spread(seconds / tokens for seconds, tokens in gaps)
    return SystemFigures(
        system=name,
        runs=len(runs),
        requests=total,
        errors=total - len(good),
        missing=len(every) * len(runs) - total,
        all=_with_servers_count(part(good), runs),
        later=part(_only(good, lambda record: record.key not in first)),
        sensitive=None if keys is None else part(_only(good, lambda record: record.key in keys)),
        rewriting=part(_only(good, lambda record: record.rewrite)),
        itl=Spread(
            _share(sum(seconds for seconds, _ in gaps), sum(tokens for _, tokens in gaps)),
            itl.p50,
            itl.p95,
            itl.p99,
        ),
        end_to_end=spread(record.end_s - record.eligible_s for record in good),
        makespan_s=_mean(max(record.end_s for record in run.good) for run in runs if run.good),
        ssd_written_bytes=_written(runs),
    )


def _only(records: Sequence[Record], wanted: Callable[[Record], bool]) -> list[Record]:
    return [record for record in records if wanted(record)]


def _with_servers_count(found: Part, runs: Sequence[Run]) -> Part:
    told = _told(runs, WITH_KV)
    if found.recomputed_with_kv is not None or told is None:
        return found
    return replace(found, recomputed_with_kv=round(sum(told)))


def _written(runs: Sequence[Run]) -> int | None:
    mean = _mean(_told(runs, SSD_WRITTEN) or ())
    return None if mean is None else round(mean)


def _told(runs: Sequence[Run], name: str) -> list[float] | None:
    """A fact of every run, None if one lacks it."""
    found = [run.facts.facts.get(name) for run in runs]
    known = [float(one) for one in found if isinstance(one, int | float) and not isinstance(one, bool)]
    return known if len(known) == len(found) else None


def _share(some: float, of: float) -> float | None:
    return some / of if of else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
