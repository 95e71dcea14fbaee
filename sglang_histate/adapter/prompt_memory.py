"""The latest prompts of a rank, outputs included, and which of them a new prompt is most like.

It knows what the radix tree has forgotten: a prompt whose KV is gone still shows where the next one departs from it.
Page hashes narrow the search, so that tokens are compared within one page only. Hashes begin with the tenant, so
prompts of different tenants never match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_TOKENS = 4_000_000
"""Of all prompts together, 8 bytes each."""

MOST_COMPARED = 16
"""Prompts that part from the new one in the same page; the latest ones are looked at."""


@dataclass(frozen=True)
class Likeness:
    """How far a prompt goes along with an earlier one.

    `position`: the first token that differs, None if one of the two ends before that. `shared`: tokens they have in
    common. `other`: the earlier prompt's token ids.
    """

    rid: str | None
    shared: int
    position: int | None
    other: np.ndarray


@dataclass(frozen=True)
class _Prompt:
    rid: str
    namespace: bytes
    keys: Sequence[bytes]  # of its whole pages
    tokens: np.ndarray  # int64
    row: int  # of the matrix of first pages


class PromptMemory:
    """Scheduler thread only. Holds at most `prompts` prompts and `tokens` tokens."""

    def __init__(self, page_size: int, prompts: int, tokens: int = MOST_TOKENS) -> None:
        self._page_size = page_size
        self._most_tokens = tokens
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        # Those that begin with the same page.
        self._families: dict[bytes, dict[str, _Prompt]] = {}
        self._tokens = 0
        # First pages side by side: unrelated prompts, which are many, are compared in one go. -1: no token.
        self._heads = np.full((prompts, page_size), -1, dtype=np.int64)
        self._rows: list[_Prompt | None] = [None] * prompts
        self._free = list(range(prompts))

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return self._tokens

    def get(self, rid: str) -> np.ndarray | None:
        """Return the tokens of a prompt, None if it is forgotten."""
        found = self._prompts.get(rid)
        return None if found is None else found.tokens

    def add(self, rid: str, namespace: bytes, keys: Sequence[bytes], tokens: np.ndarray) -> None:
        """Remember a prompt, in the place of what was remembered of `rid`; a longer one than all may have is not kept."""
        self._remove(rid)
        if len(tokens) > self._most_tokens or not self._rows:
            return
        while not self._free or self._tokens + len(tokens) > self._most_tokens:
            self._remove(next(iter(self._prompts)))
        row = self._free.pop()
        prompt = _Prompt(rid, namespace, keys, tokens, row)
        self._prompts[rid] = prompt
        if keys:
            self._families.setdefault(keys[0], {})[rid] = prompt
        self._tokens += len(tokens)
        self._rows[row] = prompt
        self._heads[row] = -1
        first = tokens[: self._page_size]
        self._heads[row, : len(first)] = first

    def match(self, namespace: bytes, keys: Sequence[bytes], tokens: np.ndarray) -> Likeness | None:
        """Return the earlier prompt that goes along furthest, the latest of equals; None if none shares a token."""
        pages, candidates = self._most_pages(keys)
        if not pages:
            return self._by_first_page(namespace, tokens)
        start = pages * self._page_size
        best: Likeness | None = None
        for prompt in candidates[:MOST_COMPARED]:
            found = _compare(prompt.rid, tokens, prompt.tokens, start, start + self._page_size)
            if best is None or found.shared > best.shared:
                best = found
        return best

    def forget(self, namespace: bytes | None) -> None:
        """Forget the prompts of a tenant, or (None) all."""
        gone = [p.rid for p in self._prompts.values() if namespace is None or p.namespace == namespace]
        for rid in gone:
            self._remove(rid)

    def _remove(self, rid: str) -> None:
        prompt = self._prompts.pop(rid, None)
        if prompt is not None:
            self._tokens -= len(prompt.tokens)
            if prompt.keys:
                family = self._families[prompt.keys[0]]
                del family[rid]
                if not family:
                    del self._families[prompt.keys[0]]
            self._rows[prompt.row] = None
            self._heads[prompt.row] = -1
            self._free.append(prompt.row)

    def _most_pages(self, keys: Sequence[bytes]) -> tuple[int, list[_Prompt]]:
        """Return the most whole pages that any prompt shares, and the prompts that share them, latest first."""
        if not keys or keys[0] not in self._families:
            return 0, []
        most, found = 1, []
        for prompt in reversed(self._families[keys[0]].values()):
            length = min(len(prompt.keys), len(keys))
            if length < most or prompt.keys[most - 1] != keys[most - 1]:
                continue
            if length > most and prompt.keys[most] == keys[most]:
                most = _shared(prompt.keys, keys, most + 1, length)
                found = [prompt]
            else:
                found.append(prompt)
        return most, found

    def _by_first_page(self, namespace: bytes, tokens: np.ndarray) -> Likeness | None:
        first = tokens[: self._page_size]
        alike = self._heads[:, : len(first)] == first
        shared = np.where(alike.all(axis=1), len(first), alike.argmin(axis=1)).tolist()
        best: _Prompt | None = None
        for prompt in reversed(self._prompts.values()):
            if prompt.namespace == namespace and shared[prompt.row] > (
                0 if best is None else shared[best.row]
            ):
                best = prompt
        return None if best is None else _compare(best.rid, tokens, best.tokens, 0, self._page_size)


def compare(tokens: np.ndarray, other: np.ndarray, start: int = 0) -> tuple[int, int | None]:
    """Return how many tokens the two share, alike up to `start`, and the first that differs (None: one ends before)."""
    end = min(len(tokens), len(other))
    differ = tokens[start:end] != other[start:end]
    if differ.any():
        position = start + int(differ.argmax())
        return position, position
    return end, None


def _compare(rid: str | None, tokens: np.ndarray, other: np.ndarray, start: int, end: int) -> Likeness:
    shared, position = compare(tokens[:end], other[:end], start)
    return Likeness(rid, shared, position, other)


def _shared(one: Sequence[Any], other: Sequence[Any], low: int, high: int) -> int:
    """Return how many items two hash chains share, of which the first `low` are known to; at most `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
