"""What a metric is: a name, a type, labels, and how its values are read from the figures of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.counters import Counters
from sglang_histate.adapter.device_pool import device_status
from sglang_histate.adapter.host_status import host_status
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.tier import SsdTier
from sglang_histate.store import CheckpointStore, Distribution, RecordKind, StoreStats
from sglang_histate.store.roots import RootStats

Labels = tuple[str, ...]
Values = Mapping[Labels, float]


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Figures:
    """What one rank knows now. Built on the scheduler thread; nothing in here waits."""

    tier: SsdTier
    stats: StoreStats
    device: Mapping[str, Any]
    host: Mapping[str, Any]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, cache: HiStateCache) -> Figures:
        tier, facts = cache.tier, cache.status_facts
        assert tier is not None and facts is not None
        allocator, states = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator
        kv_bytes, state_bytes = facts["kv_bytes_per_token"], facts["checkpoint_bytes"]
        return cls(
            tier,
            tier.store.stats(),
            device_status(allocator, states, kv_bytes, state_bytes),
            host_status(cache, tier.store.records),
            facts,
        )

    @property
    def counters(self) -> Counters:
        return self.tier.counters

    @property
    def ranking(self) -> Ranking:
        return self.tier.ranking

    @property
    def store(self) -> CheckpointStore:
        return self.tier.store


@dataclass(frozen=True)
class Metric:
    """`each_rank`: every rank has values of its own; else all ranks have the same and the first of them tells."""

    name: str
    kind: Kind
    help: str
    labels: Labels
    each_rank: bool
    read: Callable[[Figures], Mapping[Labels, Any]]

    def __post_init__(self) -> None:
        assert self.name.startswith("histate_") and self.name.endswith("_total") == (
            self.kind is Kind.COUNTER
        )


def counter(
    name: str, help_text: str, read: Callable[[Figures], Values], *labels: str, each_rank: bool = False
) -> Metric:
    """Return a counter; its name says neither `histate_` nor `_total`."""
    return Metric(f"histate_{name}_total", Kind.COUNTER, help_text, labels, each_rank, read)


def gauge(
    name: str, help_text: str, read: Callable[[Figures], Values], *labels: str, each_rank: bool = False
) -> Metric:
    return Metric(f"histate_{name}", Kind.GAUGE, help_text, labels, each_rank, read)


def histogram(
    name: str,
    help_text: str,
    read: Callable[[Figures], Mapping[Labels, Distribution]],
    *labels: str,
    each_rank: bool = False,
) -> Metric:
    return Metric(f"histate_{name}", Kind.HISTOGRAM, help_text, labels, each_rank, read)


def one(value: float) -> Values:
    """Return the value of a metric without labels."""
    return {(): value}


def by(values: Mapping[Any, float]) -> Values:
    """Return values by the word of an enum, or by a plain word."""
    return {(_word(name),): value for name, value in values.items()}


def all_of(words: type[Enum], counts: Mapping[Any, int]) -> Values:
    """Return a count for each word of an enum; what is not in `counts` is 0."""
    return {(_word(word),): counts.get(word, 0) for word in words}


def by_kind(
    figures: Figures, words: type[Enum], counts: Callable[[Any], Mapping[Any, int]]
) -> dict[Labels, float]:
    """Return a count for each kind of record and each word of an enum."""
    return {
        (kind.value, _word(word)): counts(figures.stats.kinds[kind]).get(word, 0)
        for kind in RecordKind
        for word in words
    }


def each_kind(figures: Figures, value: Callable[[Any], Any]) -> dict[Labels, Any]:
    """Return a value for each kind of record."""
    return {(kind.value,): value(figures.stats.kinds[kind]) for kind in RecordKind}


def each_directory(roots: Iterable[RootStats], value: Callable[[RootStats], float]) -> Values:
    return {(root.name,): value(root) for root in roots}


def or_unlimited(limit: float | None) -> float:
    """Return a limit, infinity where there is none."""
    return float("inf") if limit is None else limit


def _word(name: Any) -> str:
    return str(name.value if isinstance(name, Enum) else name)
