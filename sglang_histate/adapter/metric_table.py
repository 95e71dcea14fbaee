"""All metrics of HiState. docs/metrics.md has the same table for people, and a test compares both with a live server."""

from __future__ import annotations

from sglang_histate.adapter.metric import Metric
from sglang_histate.adapter.metrics_of_requests import CHECKPOINTS, HITS, POLICY, TIMES
from sglang_histate.adapter.metrics_of_storage import HEALTH, SSD, TIERS

METRICS: tuple[Metric, ...] = (*HITS, *TIERS, *CHECKPOINTS, *POLICY, *TIMES, *SSD, *HEALTH)
