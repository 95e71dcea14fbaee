"""The plot of how densely states were captured: which intervals were chosen how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.metrics import Comparison, Run
from eval.records import RecordsError
from eval.report import style

FACT = "intervals"  # in `RunFacts.facts`: {interval in tokens, or "none": how many segments}
_NONE = ("none", "0", "None", "null")


def plot(comparison: Comparison) -> Figure | None:
    """Bars by interval, one colour a system; None where no run tells."""
    chosen = {name: found for name, runs in comparison.systems.items() if (found := counts(runs))}
    if not chosen:
        return None
    kinds = sorted({interval for found in chosen.values() for interval in found}, key=_place)
    made, axes = style.figure(max(6.0, 1.2 + 0.55 * len(kinds) + 0.2 * len(chosen) * len(kinds)), 4.0)
    each = axes[0, 0]
    width = 0.8 / len(chosen)
    for number, (name, found) in enumerate(chosen.items()):
        total = sum(found.values())
        look = style.line(name)
        each.bar(
            np.arange(len(kinds)) + (number - (len(chosen) - 1) / 2) * width,
            [found.get(kind, 0) / total for kind in kinds],
            width,
            label=f"{name} ({total:,} segments)",
            facecolor=look["color"] if look["linestyle"] == "-" else "white",
            edgecolor=look["color"],
            linestyle=look["linestyle"],
            linewidth=1.2,
        )
    each.set_xticks(
        range(len(kinds)), [kind if kind == "none" else f"{int(kind):,}" for kind in kinds], rotation=45
    )
    style.plain_log(each, "y")  # short segments have no interior: "none" would hide the rest
    style.finish(each, "Intervals chosen", "interval, tokens", "share of segments")
    return made


def counts(runs: tuple[Run, ...]) -> dict[str, int]:
    """How often each interval was chosen in all runs together; "none" for segments without interior states.

    Raises:
        RecordsError: the fact has an interval that is none.
    """
    total: dict[str, int] = {}
    for run in runs:
        told: Any = run.facts.facts.get(FACT)
        if not isinstance(told, Mapping):
            continue
        for interval, count in told.items():
            text = str(interval)
            if text not in _NONE and not text.isdecimal():
                raise RecordsError(
                    f'{run.path}: facts.{FACT}: {text!r} is no number of tokens and not "none"'
                )
            name = "none" if text in _NONE else text
            if count:
                total[name] = total.get(name, 0) + int(count)
    return total


def _place(kind: str) -> tuple[bool, int]:
    return kind == "none", 0 if kind == "none" else int(kind)
