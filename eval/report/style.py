"""How every plot looks: one colour and dash per system, one grey per tier, and the command at the foot.

Colours are those of Okabe and Ito, which people of any colour vision tell apart; dashes tell apart systems of one
family. Files have no date in them: same runs, same bytes.
"""

from __future__ import annotations

import textwrap
import zlib
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _RED, _PINK, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"

_SOLID, _DASHED, _DOTTED, _MIXED = "-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5))
_LINES: dict[str, tuple[str, Any]] = {
    "infinite": (_BLACK, _DASHED),
    "histate": (_BLUE, _SOLID),
    "histate-all": (_SKY, _SOLID),
    "histate-all-tiers": (_SKY, _MIXED),
    "histate-learned-loss": (_BLUE, _MIXED),
    "histate-learned": (_BLUE, _DOTTED),
    "histate-scarce": (_GREEN, _SOLID),
    "histate-loss": (_BLACK, _DOTTED),
    "histate-bf16": (_BLACK, _MIXED),
    "histate-below": (_GREY, _DASHED),
    "histate-tiers": (_GREY, _MIXED),
    "histate-tail": (_GREY, _SOLID),
    "histate-dense": (_RED, _DOTTED),
    "histate-free": (_RED, _MIXED),
    "histate-packed": (_BLUE, _DASHED),
    "histate-lru": (_SKY, _DASHED),
    "histate-lru-refresh": (_SKY, _DOTTED),
    "histate-align": (_GREEN, _DASHED),
    "histate-fixed": (_GREEN, _DOTTED),
    "histate-fixed32": (_GREEN, _DOTTED),
    "histate-none": (_GREEN, _MIXED),
    "vllm-disk": (_RED, _SOLID),
    "vllm-cpu": (_RED, _DASHED),
    "hicache": (_PINK, _SOLID),
    "hicache-ends": (_PINK, _DASHED),
    "marconi": (_ORANGE, _SOLID),
    "stock": (_ORANGE, _DASHED),
    "none": (_GREY, _DOTTED),
    "nocache": (_GREY, _DOTTED),
}
TIER_COLOURS = {"device": "#303030", "host": "#8a8a8a", "ssd": "#d0d0d0"}
_FOOT_CHARACTERS_PER_INCH = 19
_LEGEND_CHARACTERS_PER_INCH = 14


def line(system: str) -> dict[str, Any]:
    """Return colour, dash and width of a system's line; a system that is not known gets its own by its name."""
    colour, dash = _LINES.get(system) or _unknown(system)
    ours = system == "histate"
    return {"color": colour, "linestyle": dash, "linewidth": 2.4 if ours else 1.6, "zorder": 3 if ours else 2}


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """Return an empty figure (inches) and its axes, shape [rows, columns]."""
    made = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(made)
    return made, made.subplots(rows, columns, squeeze=False, **more)


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Give axes their words and a faint grid."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plain_log(axes: Axes, which: str) -> None:
    """Make axis "x" or "y" logarithmic with plain numbers at its ticks: 0.02, 0.05, 0.1 and not powers of ten."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=16))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def nothing(axes: Axes, why: str) -> None:
    """Say on empty axes why they are empty."""
    axes.set_axis_off()
    text = axes.text(0.5, 0.5, textwrap.fill(why, 40), ha="center", va="center", fontsize=10, color="#555555")
    text.set_in_layout(False)


def save(made: Figure, path: Path, command: str, legend: bool = True) -> None:
    """Write a PNG with the command at its foot and in its metadata, and one legend for all axes above it."""
    width, height = made.get_size_inches()
    foot = textwrap.wrap(command, int(width * _FOOT_CHARACTERS_PER_INCH))
    entries: dict[str, Any] = {}
    for axes in made.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    below = (0.12 + 0.11 * len(foot)) / height
    if legend and entries:
        widest = 0.85 + max(len(label) for label in entries) / _LEGEND_CHARACTERS_PER_INCH
        columns = min(len(entries), max(1, int(width / widest)))
        lines = -(-len(entries) // columns)
        made.legend(
            list(entries.values()), list(entries), loc="lower center", bbox_to_anchor=(0.5, below), ncol=columns,
            fontsize=8, frameon=False, handlelength=3.2,
        )  # fmt: skip
        space = below + (0.1 + 0.19 * lines) / height
    else:
        space = below
    made.tight_layout(rect=(0, space, 1, 1))
    made.text(
        0.01, 0.05 / height, "\n".join(foot), fontsize=6, color="#777777", family="monospace", va="bottom"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, metadata={"Software": None, "Description": command})


def tokens(count: float) -> str:
    """A number of tokens for an axis: 512, 4K, 128K."""
    return f"{count / 1024:g}K" if count >= 1024 else f"{count:g}"


def _unknown(system: str) -> tuple[str, Any]:
    number = zlib.crc32(system.encode())
    return (
        ("#8c564b", "#6a3d9a", "#556b2f")[number % 3],
        (_SOLID, _DASHED, _DOTTED, _MIXED)[number // 3 % 4],
    )
