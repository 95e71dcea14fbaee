"""Sessions out of requests that have no session id: a request goes on with the session whose text it shares.

For requests in the order they were sent, over blocks whose ids mean the same in all of them:

- Where many prompts part (`TRUNK_BRANCHES` different next blocks or more), what they share up to there is the
  trunk: a system prompt, tool descriptions. Sharing the trunk says nothing about who talks.
- Beyond the trunk, a request belongs to the session that last sent the longest prefix of it, if that prefix is at
  least half of the request or half of that session's last prompt, the trunk aside. So what is appended stays with
  its session however long it is, and so does a prompt that drops the later half.
- Any other request begins a session.

It is a guess from content: two people who send the same text are one session to it, and where fewer than
`TRUNK_BRANCHES` sessions share a system prompt, short ones may be taken for one session that starts over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from eval.workloads.sessions import Session, Turn

TRUNK_BRANCHES = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a file. `at_s` is on the file's clock; the other fields as in `Turn`.

    `owner` is what the file says about who sent it, "" if nothing: requests of two owners are never one session.
    `number` is the reader's own, to find the request again.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    service_s: float = 0.0
    owner: str = ""
    number: int = 0


def chained(requests: Sequence[Request]) -> list[list[Request]]:
    """Return the requests by session, sessions in the order they began. `requests` are ordered by `at_s`."""
    tree = _Tree(requests)
    sessions: list[list[Request]] = []
    last: dict[int, int] = {}  # prefix -> the session that sent it last
    for request in requests:
        path = tree.path(request)
        trunk = next((depth for depth, node in enumerate(path) if not tree.is_trunk(node)), len(path))
        shared = len(path)
        while shared > trunk and path[shared - 1] not in last:
            shared -= 1
        session = -1
        if shared > trunk:
            session = last[path[shared - 1]]
            shorter = min(len(path), len(sessions[session][-1].blocks))
            if 2 * (shared - trunk) < shorter - trunk:
                session = -1
        if session < 0:
            session = len(sessions)
            sessions.append([])
        sessions[session].append(request)
        for node in path[trunk:]:
            last[node] = session
    return sessions


def single(requests: Sequence[Request]) -> list[list[Request]]:
    """Return every request as a session of its own."""
    return [[request] for request in requests]


def sessions_of(
    groups: Iterable[Sequence[Request]], block_tokens: int, names: Iterable[str] | None = None
) -> list[Session]:
    """Return sessions with ids that mean the same in all of them, named by number unless `names` are given.

    Each group is one session's requests in the order they were sent. Times count from the first request of all.
    """
    kept = [group for group in groups if group]
    begin = min((group[0].at_s for group in kept), default=0.0)
    names = names or (f"chain-{number:05d}" for number in range(len(kept)))
    return [
        Session(name, block_tokens, _turns(group), shared_ids=True, start_s=group[0].at_s - begin)
        for name, group in zip(names, kept, strict=True)
    ]


def _turns(group: Sequence[Request]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for one in group:
        start = one.at_s - group[0].at_s
        gap = max(start - turns[-1].start_s - turns[-1].service_s, 0.0) if turns else 0.0
        turns.append(Turn(one.input_tokens, one.output_tokens, one.blocks, start, gap, one.service_s))
    return tuple(turns)


class _Tree:
    """All prefixes of all requests. A node is a prefix; every owner has a root of its own."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        parents: list[int] = []
        branches: list[int] = []
        for request in requests:
            at = -1
            for key in _keys(request):
                found = self._next.get((at, key))
                if found is None:
                    found = self._next[at, key] = len(parents)
                    parents.append(at)
                    branches.append(0)
                    if at >= 0:
                        branches[at] += 1
                at = found
        # A node is made after its parent, so that one pass from the end carries the mark up.
        self._trunk = bytearray(count >= TRUNK_BRANCHES for count in branches)
        for node in range(len(parents) - 1, -1, -1):
            if self._trunk[node] and parents[node] >= 0:
                self._trunk[parents[node]] = 1

    def path(self, request: Request) -> list[int]:
        """Return the nodes of the request's blocks."""
        nodes = []
        at = -1
        for key in _keys(request):
            at = self._next[at, key]
            nodes.append(at)
        return nodes[1:]

    def is_trunk(self, node: int) -> bool:
        return bool(self._trunk[node])


def _keys(request: Request) -> Iterable[Hashable]:
    yield request.owner
    yield from request.blocks
