"""The plot of where hits land: past the checkpoint that serves them, and before the last turn's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.metrics import Comparison, Run
from eval.records import Record
from eval.report import style

_LEAST = 1e-4  # lower end of the axis
# Upper ends of the classes of distance, in tokens; the first is "nothing", the last has no end.
BOUNDS = (0, *(64 << power for power in range(12)))
LABELS = ("0", *(f"≤{style.tokens(bound)}" for bound in BOUNDS[1:]), f">{style.tokens(BOUNDS[-1])}")


def plot(comparison: Comparison) -> Figure:
    """Two histograms of distances, one line a system.

    Left: from the point that a state was restored at to the end of the KV that matched, tokens computed again with
    their KV there. Right: from the end of the matching KV to the end of the same list's turn before; more than the
    tokens of the answer means that the hit is an internal one. Dashed there: the same for an infinite cache.
    """
    made, axes = style.figure(11, 4.9, columns=2, sharey=True)
    left, right = axes[0]
    for name, runs in comparison.systems.items():
        _line(left, checkpoint_distances(runs), name)
        _line(right, turn_end_distances(runs), name)
    if "infinite" not in comparison.systems:
        _line(right, turn_end_distances(comparison.runs[:1], reusable=True), "infinite")
    words = (
        (
            "From the state used to the end of matching KV",
            "tokens computed again with their KV there",
            "No system tells how much KV matched, or none did.",
        ),
        (
            "From the end of matching KV to the last turn's end",
            "tokens",
            "No session has a second turn that ended well.",
        ),
    )
    for each, (title, x, why) in zip(axes[0], words, strict=True):
        if not each.lines:
            style.nothing(each, why)
            continue
        each.set_xticks(range(len(LABELS)), LABELS, rotation=60)
        each.set_xlim(-0.5, len(LABELS) - 0.5)
        style.plain_log(each, "y")
        each.set_ylim(_LEAST, 1.3)
        style.finish(each, title, x, "share of requests")
    return made


def checkpoint_distances(runs: Sequence[Run]) -> list[int]:
    """Tokens between the restored point and the end of matching KV, of requests that tell and match any KV."""
    return [
        record.recomputed_with_kv
        for run in runs
        for record in run.good
        if record.kv_match and record.recomputed_with_kv is not None
    ]


def turn_end_distances(runs: Sequence[Run], reusable: bool = False) -> list[int]:
    """Tokens from the end of matching KV (or of what is `reusable`) to the end of the turn before in the same list.

    The turn's end is that of its answer. 0 where the match goes past it. The first turn of a list has none before.
    """
    found = []
    for run in runs:
        lists: dict[tuple[str, str], list[Record]] = {}
        for record in run.good:
            lists.setdefault((record.session, record.agent), []).append(record)
        for records in lists.values():
            records.sort(key=lambda record: record.turn)
            for before, record in pairwise(records):
                match = record.reusable if reusable else record.kv_match
                if match is not None and record.turn == before.turn + 1:
                    found.append(max(before.prompt_tokens + before.output_tokens - match, 0))
    return found


def shares(distances: Sequence[int]) -> list[float]:
    """Share of the distances in each class of `LABELS`."""
    counts = Counter(_class(distance) for distance in distances)
    return [counts[number] / len(distances) for number in range(len(LABELS))]


def _class(distance: int) -> int:
    return next((number for number, bound in enumerate(BOUNDS) if distance <= bound), len(BOUNDS))


def _line(axes: Axes, distances: Sequence[int], name: str) -> None:
    if distances:
        # A class without requests lies below the axis: the line leaves the plot there.
        values = [share or _LEAST / 10 for share in shares(distances)]
        axes.plot(range(len(LABELS)), values, marker="o", markersize=3.5, label=name, **style.line(name))
