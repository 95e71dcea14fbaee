"""The parts of a prompt that may be very long: numpy looks for where a marker can begin, the policy does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_histate.policy.structure import Span, Structure

MOST_MARKERS = 4096
"""In a prompt whose parts decide something: with more, somebody plays with them, and the scheduler has other things to do."""


def prompt_spans(
    structure: Structure, tokens: Sequence[int] | np.ndarray, most: int | None = None
) -> list[Span]:
    """Return `structure.spans` of `tokens`, an array of 64-bit integers or any other sequence of ids.

    None at all where more than `most` markers seem to begin.
    """
    ids: Any = np.asarray(tokens, dtype=np.int64)
    begins = np.zeros(len(ids), dtype=bool)
    for marker in structure.markers:
        # Words that begin a marker are common; the first few ids together are not.
        first = marker.ids[:4]
        if len(ids) < len(first):
            continue
        here = ids[: len(ids) - len(first) + 1] == first[0]
        for offset, token in enumerate(first[1:], start=1):
            if not here.any():
                break
            here &= ids[offset : offset + len(here)] == token
        begins[: len(here)] |= here
    if most is not None and np.count_nonzero(begins) > most:
        return []
    return structure.spans(ids, np.flatnonzero(begins).tolist())
