"""A bar on a terminal for work of more than five seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_AFTER_S = 5


@contextmanager
def progress(total: int, unit: str, what: str) -> Iterator[Callable[[int], None]]:
    """Give a function that is told what is done; a bar appears on a terminal after five seconds."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        desc=what,
        delay=PROGRESS_AFTER_S,
        disable=None,
        leave=False,
    ) as bar:
        yield lambda count: bar.update(count) and None
