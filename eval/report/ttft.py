"""The plot of how long requests waited: distribution of TTFT, over all requests and the reuse-sensitive ones."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.metrics import Comparison, Sensitive
from eval.metrics.runs import Key
from eval.report import style

_LEAST_S = 1e-4  # a logarithmic axis has no 0


def plot(comparison: Comparison, chosen: Sensitive) -> Figure:
    """Above: share of requests that waited at most so long. Below: share that waited longer, so that tails show."""
    made, axes = style.figure(11, 8, rows=2, columns=2, sharex=True)
    parts: list[tuple[str, Collection[Key] | None]] = [("All requests", None)]
    if chosen.keys:
        parts.append((f"Reuse-sensitive requests ({len(chosen.keys):,})", chosen.keys))
    for column, (title, keys) in enumerate(parts):
        drawn = [_lines(comparison, keys, axes[0, column], axes[1, column])]
        if not any(drawn):
            for each in axes[:, column]:
                style.nothing(each, "No request ended well.")
            continue
        for each in axes[:, column]:
            style.plain_log(each, "x")
        style.plain_log(axes[1, column], "y")
        style.finish(axes[0, column], title, "", "share of requests")
        style.finish(
            axes[1, column], "Tail", "TTFT, s (from eligible)", "share that waited as long or longer"
        )
    if not chosen.keys:
        why = (
            "No request is reuse-sensitive."
            if chosen.keys is not None
            else f"Reuse-sensitive requests: {chosen.rule}."
        )
        for each in axes[:, 1]:
            style.nothing(each, why)
    return made


def _lines(comparison: Comparison, keys: Collection[Key] | None, above: Axes, below: Axes) -> bool:
    drawn = False
    for name, runs in comparison.systems.items():
        times = np.sort(
            [record.ttft_s for run in runs for record in run.good if keys is None or record.key in keys]
        )
        if not len(times):
            continue
        drawn = True
        times = np.maximum(times, _LEAST_S)
        share = np.arange(1, len(times) + 1) / len(times)
        above.step(times, share, where="post", label=name, **style.line(name))
        # Before each time: with the last one none is left, which a logarithmic axis cannot show.
        below.step(times, 1 - share + 1 / len(times), where="pre", **style.line(name))
    return drawn
