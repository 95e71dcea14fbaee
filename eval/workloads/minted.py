"""Block ids for traces that say how much of a prompt was kept, but not what is in it."""

from __future__ import annotations

from collections.abc import Iterable


def minted(prompts: Iterable[tuple[int, int]], block_tokens: int) -> list[tuple[int, ...]]:
    """Return the ids of the whole blocks of each prompt of one session.

    `prompts` are (length, kept) in tokens: a prompt keeps the whole blocks of the one before it that lie within
    its first `kept` tokens. All its other blocks are new: they are in no earlier prompt.
    """
    ids: list[int] = []
    found = []
    fresh = 0
    for length, kept in prompts:
        whole = length // block_tokens
        del ids[min(kept // block_tokens, whole) :]
        new = whole - len(ids)
        ids.extend(range(fresh, fresh + new))
        fresh += new
        found.append(tuple(ids))
    return found
