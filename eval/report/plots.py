"""All plots of a report: which there are, what each is called and what its caption says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from eval.metrics import Comparison, Sensitive
from eval.report import cost_plots, interval_plot, landing, style, tiers, ttft
from eval.simulate.costs import Costs


@dataclass(frozen=True)
class Plot:
    """A file that was written: its name, its heading and what the reader sees on it."""

    file: str
    title: str
    caption: str


def write_all(comparison: Comparison, chosen: Sensitive, folder: Path, name: str, command: str) -> list[Plot]:
    """Write every plot that has something to show as `folder/name-*.png`; return them in order."""
    costs = Costs()
    servers = (
        " As each server counts: compare within one system only." if comparison.source == "engine" else ""
    )
    every: list[tuple[str, str, str, Callable[[], Figure | None]]] = [
        (
            "ttft",
            "Time to first token",
            "Distribution of TTFT from eligible to the first token; below, the tail on a logarithmic axis.",
            lambda: ttft.plot(comparison, chosen),
        ),
        (
            "tiers",
            "Hits by tier over time",
            "Prompt tokens that were not computed again, by the tier that their KV was read from." + servers,
            lambda: tiers.plot(comparison),
        ),
        (
            "landing",
            "Where hits land",
            "Distances from the state used to the end of matching KV, and from there to the last turn's end. A system "
            "that does not tell how much KV matched has no line.",
            lambda: landing.plot(comparison),
        ),
        (
            "intervals",
            "Intervals",
            "How often each interval was chosen for a new segment; none: only its end was captured.",
            lambda: interval_plot.plot(comparison),
        ),
        (
            "access",
            "Access ratio",
            "From sizes alone (Qwen3.5-9B): what one hit reads of the bytes that a context takes.",
            lambda: cost_plots.access(costs),
        ),
        (
            "reading",
            "Reading or computing",
            "From sizes and speeds alone (Qwen3.5-9B, one H100): time to have a prefix again.",
            lambda: cost_plots.reading(costs),
        ),
    ]
    written = []
    for short, title, caption, draw in every:
        made = draw()
        if made is None:
            continue
        file = f"{name}-{short}.png"
        style.save(made, folder / file, command)
        written.append(Plot(file, title, caption))
    return written
