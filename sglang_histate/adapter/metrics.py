"""The metrics of one rank: read from the figures once a second and handed to Prometheus, or asked for by the status.

Counters are kept as plain numbers where things happen; here is only their way out. Times go to Prometheus one by one, as
they are observed. SGLang's /metrics collects what all processes of the server have written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_histate.adapter.for_people import for_people
from sglang_histate.adapter.metric import Figures, Kind, Labels, Metric
from sglang_histate.store import Distribution

INTERVAL_S = 0.9
"""An idle scheduler wakes once a second: a little less, so that each time counts. Prometheus comes by every few seconds."""


class MetricsExport:
    """Scheduler thread only. Every name and every value of a label is there from the start."""

    def __init__(
        self,
        metrics: Sequence[Metric],
        figures: Callable[[], Figures],
        labels: Mapping[str, str],
        *,
        first_rank: bool,
        registry: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`labels` go to every metric. A rank that is not the first one tells only what each rank has of its own.

        SGLang has said by the environment where the processes leave their numbers before this is called.
        """
        import prometheus_client

        self._figures = figures
        self._clock = clock
        self._registry = registry or prometheus_client.REGISTRY
        self._labels = dict(labels)
        self._published_s = -math.inf
        self._told: list[_Told] = []
        now = figures()
        for metric in metrics:
            if first_rank or metric.each_rank:
                self._add(metric, now)

    @for_people("publishing metrics")
    def tick(self) -> None:
        """Publish what has changed, if the last time is long enough ago. Costs a fraction of a millisecond then."""
        now_s = self._clock()
        if now_s - self._published_s >= INTERVAL_S:
            self._published_s = now_s
            self.publish()

    def publish(self) -> None:
        """Publish what has changed."""
        now = self._figures()
        for told in self._told:
            told.tell(now)

    def _add(self, metric: Metric, now: Figures) -> None:
        import prometheus_client

        common: dict[str, Any] = {
            "labelnames": (*self._labels, *metric.labels),
            "registry": self._registry,
        }
        fixed = tuple(self._labels.values())
        told: _Told
        if metric.kind is Kind.COUNTER:
            told = _Counter(metric, prometheus_client.Counter(metric.name, metric.help, **common), fixed)
        elif metric.kind is Kind.GAUGE:
            common["multiprocess_mode"] = "mostrecent"
            told = _Gauge(metric, prometheus_client.Gauge(metric.name, metric.help, **common), fixed)
        else:
            spreads: Mapping[Labels, Distribution] = metric.read(now)
            (bounds,) = {spread.bounds for spread in spreads.values()}
            shown = prometheus_client.Histogram(metric.name, metric.help, buckets=bounds, **common)
            for labels, spread in spreads.items():
                spread.heard = shown.labels(*fixed, *labels).observe
            return
        told.tell(now)
        self._told.append(told)


class _Told:
    """One metric and what Prometheus was told of it last."""

    def __init__(self, metric: Metric, shown: Any, fixed: Labels) -> None:
        self._metric = metric
        self._shown = shown
        self._fixed = fixed
        self._last: dict[Labels, float] = {}
        self._children: dict[Labels, Any] = {}

    def tell(self, figures: Figures) -> None:
        for labels, value in self._metric.read(figures).items():
            child = self._children.get(labels)
            if child is None:
                child = self._children[labels] = self._shown.labels(*self._fixed, *labels)
            self._tell(child, labels, float(value))

    def _tell(self, child: Any, labels: Labels, value: float) -> None:
        raise NotImplementedError


class _Counter(_Told):
    """Prometheus adds up, so it is told what came on top. What does not grow is not told: a counter never goes down."""

    def _tell(self, child: Any, labels: Labels, value: float) -> None:
        more = value - self._last.get(labels, 0.0)
        if more > 0:
            child.inc(more)
            self._last[labels] = value


class _Gauge(_Told):
    def _tell(self, child: Any, labels: Labels, value: float) -> None:
        if self._last.get(labels) != value:
            child.set(value)
            self._last[labels] = value


def metrics_as_json(metrics: Sequence[Metric], figures: Figures) -> dict[str, Any]:
    """Return every metric by name: a number, or one by its labels (``a=x,b=y``); of a distribution, its buckets.

    Infinity, which JSON does not have, is None.
    """
    found: dict[str, Any] = {}
    for metric in metrics:
        values = {
            ",".join(f"{name}={value}" for name, value in zip(metric.labels, labels, strict=True)): _plain(
                value
            )
            for labels, value in metric.read(figures).items()
        }
        found[metric.name] = values if metric.labels else values[""]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Distribution):
        return value.as_json()
    number = float(value)
    if math.isinf(number):
        return None
    return int(number) if number.is_integer() else number
