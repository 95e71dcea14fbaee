"""What runs of one workload say: `load` and `compare` them, then `figures`, `ratios`, `summary` or `text_table`."""

from __future__ import annotations

from eval.metrics.bootstrap import Interval, Ratio, intervals, ratios
from eval.metrics.runs import Comparison, NotComparable, Run, compare, load
from eval.metrics.sensitivity import Sensitive, sensitive
from eval.metrics.spread import Spread
from eval.metrics.summaries import summary
from eval.metrics.system_figures import Part, SystemFigures, figures
from eval.metrics.table import text_table

__all__ = [
    "Comparison",
    "Interval",
    "NotComparable",
    "Part",
    "Ratio",
    "Run",
    "Sensitive",
    "Spread",
    "SystemFigures",
    "compare",
    "figures",
    "intervals",
    "load",
    "ratios",
    "sensitive",
    "summary",
    "text_table",
]
