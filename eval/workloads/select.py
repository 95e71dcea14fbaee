"""Which sessions of a workload, and how much of each.

A selection is a text for command lines, steps by comma, taken from left to right:

    only:codex:          sessions whose names begin so
    context:131072       each session up to its first request whose prompt and output take more; those left empty go
    first:125            the first so many that have a request
    without:FILE         sessions that a list does not have, to tune on others than those that are reported
    w125, w125:FILE      exactly what a published list has, see `listed`; FILE is w125.json beside the trace
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from eval.workloads import fields
from eval.workloads.fields import Where
from eval.workloads.lines import one_json
from eval.workloads.sessions import Agent, Session, Turn

W125_FILE = "w125.json"
W125_CONTEXT_TOKENS = 131_072
HELP = (
    "steps by comma: only:NAME.. , without:FILE, context:TOKENS, first:N, w125[:FILE] (all sessions, whole)"
)


class BadSelection(ValueError):
    """A selection is none, or a list does not match the trace; the message says what to do."""


@dataclass(frozen=True)
class Listing:
    """A list of sessions with what must come out of it."""

    file: Path
    ids: tuple[str, ...]
    sessions: int
    requests: int


def select(sessions: Iterable[Session], text: str = "", near: Path | None = None) -> Iterator[Session]:
    """Return the selected sessions; of the trace no more is read than they need.

    `near` is the trace: where w125 looks for its list.

    Raises:
        BadSelection: see there, and `listed`.
        TraceError: the list is not as it should be.
    """
    found = iter(sessions)
    for step in filter(None, (part.strip() for part in text.split(","))):
        kind, _, value = step.partition(":")
        if kind == "only" and value:
            found = _only(found, value)
        elif kind == "without" and value:
            found = _without(found, frozenset(read_listing(Path(value)).ids))
        elif kind == "context":
            found = cut_before(found, _number(step, value))
        elif kind == "first":
            found = islice((session for session in found if session.requests), _number(step, value))
        elif kind == "w125":
            folder = near if near is None or near.is_dir() else near.parent
            file = Path(value) if value else (folder or Path()) / W125_FILE
            found = iter(listed(found, read_listing(file)))
        else:
            raise BadSelection(f"{step} selects nothing: {HELP}")
    return found


def cut_before(sessions: Iterable[Session], context_tokens: int) -> Iterator[Session]:
    """Yield each session up to, without, its first request that takes more than `context_tokens`.

    The requests of agents count where they were started: a session and its agents are one list here, and what comes
    after the full one is left out, of whichever agent it is. `Session.cut` ends each list of its own.
    """
    for session in sessions:
        kept = _cut(session, context_tokens)
        if kept.requests:
            yield kept


def _cut(session: Session, context_tokens: int) -> Session:
    own: list[Turn] = []
    agents: list[Agent] = []
    spawned: dict[int, list[Agent]] = {}
    for agent in session.agents:
        spawned.setdefault(agent.after, []).append(agent)
    full = False
    for index in range(-1, len(session.turns)):
        if index >= 0:
            full = _takes(session.turns[index]) > context_tokens
            if full:
                break
            own.append(session.turns[index])
        for agent in spawned.get(index, ()):
            fits = next((n for n, t in enumerate(agent.turns) if _takes(t) > context_tokens), None)
            kept = agent.turns[:fits]
            if kept:
                agents.append(replace(agent, turns=kept))
            full = fits is not None
            if full:
                break
        if full:
            break
    return replace(session, turns=tuple(own), agents=tuple(agents))


def _takes(turn: Turn) -> int:
    return turn.input_tokens + turn.output_tokens


def read_listing(file: Path) -> Listing:
    """Return a list in the form of w125.json: an object with `ids`, `sessions` and `requests`.

    Raises:
        TraceError: it has another form.
        BadSelection: there is no such file.
    """
    try:
        value, where = one_json(file)
    except OSError as error:
        raise BadSelection(f"w125 needs its list, and {file} cannot be read: {error.strerror}") from None
    found = fields.record(value, where)
    place: Where = where.at("ids")
    ids = fields.items(fields.member(found, "ids", where), place)
    for index, one in enumerate(ids):
        if not isinstance(one, str):
            raise place.at(index).error(f"a text is expected, not {fields.shown(one)}")
    return Listing(
        file, tuple(ids), fields.count(found, "sessions", where), fields.count(found, "requests", where)
    )


def listed(sessions: Iterable[Session], listing: Listing) -> list[Session]:
    """Return the listed sessions, each cut as `cut_before` does at 131,072 tokens, in the order of `sessions`.

    Raises:
        BadSelection: a listed session is not there, or not as many sessions or requests come out as listed: it is
            another trace.
    """
    wanted = set(listing.ids)
    found: list[Session] = []
    for session in sessions:
        if session.name in wanted:
            wanted.discard(session.name)
            found += cut_before([session], W125_CONTEXT_TOKENS)
        if not wanted:
            break
    if wanted:
        raise BadSelection(
            f"{listing.file} lists {min(wanted)}, which the trace has not: give the trace of the list"
        )
    requests = sum(session.requests for session in found)
    if (len(found), requests) != (listing.sessions, listing.requests):
        raise BadSelection(
            f"{listing.file} lists {listing.sessions} sessions with {listing.requests} requests; this trace has "
            f"{len(found)} with {requests}: give the trace of the list"
        )
    return found


def _only(sessions: Iterable[Session], beginning: str) -> Iterator[Session]:
    return (session for session in sessions if session.name.startswith(beginning))


def _without(sessions: Iterable[Session], names: frozenset[str]) -> Iterator[Session]:
    return (session for session in sessions if session.name not in names)


def _number(step: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise BadSelection(f"{step}: a number above 0 is expected after the colon")
    return int(value)
