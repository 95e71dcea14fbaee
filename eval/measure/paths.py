"""Prompts as paths in a tree of pages, in the order they were sent.

The page is the smallest unit in which both the recorded blocks and the server's pages (64 tokens) are whole: 64
tokens for blocks of 16 or 64, 512 for blocks of 512. Matches, turn ends and checkpoints are counted in it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from eval.simulate.costs import PAGE_TOKENS
from eval.workloads.sessions import Session, Turn


@dataclass(frozen=True)
class Sent:
    """One request. `anew`: the ids of the requests before it mean nothing to it: begin with an empty tree."""

    session: Session
    turn: Turn
    anew: bool


def in_order(sessions: Iterable[Session]) -> Iterator[Sent]:
    """Yield all requests by the time they were sent.

    Sessions whose ids are their own come one by one as they are read, because they share nothing; the others follow,
    all of them by the file's clock.
    """
    shared: list[Session] = []
    for session in sessions:
        if session.shared_ids:
            shared.append(session)
            continue
        # Sorting is stable: turns with equal times stay in the order of the file.
        turns = sorted(session.all_turns(), key=lambda turn: turn.start_s)
        for index, turn in enumerate(turns):
            yield Sent(session, turn, index == 0)
    all_turns = [
        (session.start_s + turn.start_s, session, turn) for session in shared for turn in session.all_turns()
    ]
    all_turns.sort(key=lambda one: one[0])
    for index, (_, session, turn) in enumerate(all_turns):
        yield Sent(session, turn, index == 0)


def page_tokens(session: Session) -> int:
    """Return the page's size for the session's blocks."""
    return math.lcm(session.block_tokens, PAGE_TOKENS)


def page_keys(session: Session, turn: Turn) -> Iterator[Hashable]:
    """Yield what tells the turn's whole pages from others after the same prefix."""
    step = page_tokens(session) // session.block_tokens
    blocks = turn.blocks
    if step == 1:
        yield from blocks
    else:
        for at in range(0, len(blocks) - step + 1, step):
            yield blocks[at : at + step]


class Tree:
    """All prefixes sent so far. A node is a prefix of whole pages; nodes are numbered from 0 as they come."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        self.turn_end = array("q")
        """For each node, the pages of the prompt that first had it: where that turn ends."""
        self._goes_on = bytearray()
        """For each node, whether a prompt has gone on after it."""

    def __len__(self) -> int:
        return len(self.turn_end)

    def add(self, keys: Iterable[Hashable]) -> tuple[list[int], int, bool]:
        """Return a prompt's nodes, first page first, how many of them were there before, and whether the last of those
        was the end of a path: no prompt had gone on after it."""
        path: list[int] = []
        at, known, ended = -1, 0, False
        find = self._next
        for key in keys:
            node = find.get((at, key))
            if node is None:
                node = find[at, key] = len(find)
            else:
                # A new node has no old ones below it, so that what is known is a beginning of the path.
                known += 1
                ended = not self._goes_on[node]
            path.append(node)
            at = node
        new = len(path) - known
        self.turn_end.extend([len(path)] * new)
        if new:
            self._goes_on.extend([1] * (new - 1) + [0])
            if known:
                self._goes_on[path[known - 1]] = 1
        return path, known, ended
