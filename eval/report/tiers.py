"""The plot of hit rate by tier over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from eval.metrics import Comparison, Run
from eval.records import TIERS
from eval.report import style

WINDOWS = 30
_COLUMNS = 3


def plot(comparison: Comparison) -> Figure:
    """One small plot a system, all of one scale: share of prompt tokens restored in each window of time.

    A request counts in the window in which it was sent. The line is what the infinite cache would restore of the
    same requests. Repeats of a system are put together.
    """
    names = list(comparison.systems)
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    made, axes = style.figure(3.7 * columns + 0.3, 2.3 * rows + 0.9, rows, columns, sharex=True, sharey=True)
    for number, each in enumerate(axes.flat):
        if number >= len(names):
            each.set_axis_off()
            continue
        name = names[number]
        if not any(run.good for run in comparison.systems[name]):
            style.nothing(each, f"{name}: no request ended well.")
            continue
        _one(each, comparison.systems[name])
        y = "share of prompt tokens" if number % columns == 0 else ""
        x = "time since start, min" if number + columns >= len(names) else ""
        style.finish(each, name, x, y)
        each.xaxis.set_tick_params(labelbottom=bool(x))
        each.set_ylim(0, 1.03)
    return made


def windows(runs: Sequence[Run], last_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return shares of prompt tokens by window: restored by tier, shape [3, WINDOWS], and reusable, [WINDOWS].

    Windows split the time from 0 to `last_s` evenly; NaN where no request was sent.
    """
    good = [record for run in runs for record in run.good]
    step = last_s / WINDOWS or 1.0
    index = np.array([min(int(record.sent_s / step), WINDOWS - 1) for record in good], dtype=np.int64)

    def sums(values: list[int]) -> NDArray[np.float64]:
        found = np.zeros(WINDOWS)
        np.add.at(found, index, values)
        return found

    prompt = sums([record.prompt_tokens for record in good])
    prompt[prompt == 0] = np.nan
    tiers = np.stack([sums([record.restored.get(tier, 0) for record in good]) for tier in TIERS])
    return tiers / prompt, sums([record.reusable for record in good]) / prompt


def _one(axes: Axes, runs: Sequence[Run]) -> None:
    last_s = max(record.sent_s for run in runs for record in run.good)
    tiers, bound = windows(runs, last_s)
    edges = np.linspace(0, (last_s or 1.0) / 60, WINDOWS + 1)
    below = np.zeros(WINDOWS)
    for tier, share in zip(TIERS, tiers, strict=True):
        top = below + np.nan_to_num(share)
        axes.stairs(
            top, edges, baseline=below, fill=True, color=style.TIER_COLOURS[tier], label=f"from {tier}"
        )
        below = top
    axes.stairs(bound, edges, baseline=None, label="infinite cache", **style.line("infinite"))
