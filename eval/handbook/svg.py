"""Small pictures as SVG text: shapes, words, axes. Same input, same bytes; readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

# Of Okabe and Ito, which people of any colour vision tell apart.
BLUE, ORANGE, GREEN, RED, PINK, GREY, INK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#8a8a8a",
    "#222222",
)


class Picture:
    """Collects shapes; `text` gives the file. Lengths in pixels, origin at the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, outline: str = "none"
    ) -> None:
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}" stroke="{outline}"/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, width: float = 1, dash: str = ""
    ) -> None:
        where = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="{_n(width)}"{dashes}/>'
        )

    def circle(self, x: float, y: float, radius: float, fill: str, outline: str = "none") -> None:
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}" stroke="{outline}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = INK,
        size: int = 12,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def text(self) -> str:
        """Return the SVG file."""
        width, height = self._size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="sans-serif" role="img" aria-label={quoteattr(self._title)}>',
                f"<title>{escape(self._title)}</title>",
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
