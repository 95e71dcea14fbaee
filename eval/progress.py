"""A bar for loops of more than five seconds, on a terminal; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from sglang_histate.cli.progress import PROGRESS_AFTER_S

_Item = TypeVar("_Item")


def each(items: Iterable[_Item], what: str, unit: str, total: int | None = None) -> Iterator[_Item]:
    """Yield `items`; `total` is how many there are where the items do not tell."""
    bar = tqdm(items, what, total, unit=unit, delay=PROGRESS_AFTER_S, disable=None, leave=False)
    yield from bar
