"""The order in which the turns of many sessions reach a server, fixed before anything is sent.

A closed loop: `live` sessions at a time, the next turn after the answer and a pause, a session's successor when
it has ended. The loop is run with the recorded times, pauses cut at `longest_gap_s`; only the order is kept. So
every system under test gets the same requests in the same order, however fast it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from eval.workloads.sessions import Agent, Session, Turn


@dataclass(frozen=True)
class Step:
    """One request. `agent` is "" for the session's own turns; `index` counts the turns of its list from 0."""

    session: Session
    agent: str
    index: int
    turn: Turn


@dataclass
class _List:
    """A list of turns under way: a session's own or an agent's."""

    session: Session
    turns: Sequence[Turn]
    agent: Agent | None
    parent: _List | None
    next: int = 0
    waits_for: int = 0  # agents it started that have not ended
    ready_s: float = 0.0  # when its next turn would start if no agent were under way


def closed_loop(sessions: Sequence[Session], live: int, longest_gap_s: float) -> list[Step]:
    """Return all turns of the sessions in the order they are sent; ties in the order they became known.

    Raises:
        ValueError: `live` is less than 1 or the gap is negative.
    """
    if live < 1 or longest_gap_s < 0:
        raise ValueError(f"{live} live sessions and gaps up to {longest_gap_s} s are no closed loop")
    return _Loop(sessions, longest_gap_s).run(live)


class _Loop:
    """The loop's clock and what waits for it."""

    def __init__(self, sessions: Sequence[Session], longest_gap_s: float) -> None:
        self._waiting = [session for session in reversed(sessions) if session.requests]
        self._longest_gap_s = longest_gap_s
        self._queue: list[tuple[float, int, _List]] = []
        self._pushed = 0
        self._now_s = 0.0

    def run(self, live: int) -> list[Step]:
        for _ in range(live):
            self._begin()
        steps = []
        while self._queue:
            self._now_s, _, one = heappop(self._queue)
            turn = one.turns[one.next]
            steps.append(Step(one.session, one.agent.name if one.agent else "", one.next, turn))
            one.next += 1
            self._now_s += turn.service_s
            if one.next < len(one.turns):
                one.ready_s = self._now_s + min(one.turns[one.next].gap_s, self._longest_gap_s)
            self._go_on(one)
        return steps

    def _push(self, at_s: float, one: _List) -> None:
        self._pushed += 1
        heappush(self._queue, (at_s, self._pushed, one))

    def _begin(self) -> None:
        if self._waiting:
            session = self._waiting.pop()
            self._go_on(_List(session, session.turns, None, None, ready_s=self._now_s))

    def _go_on(self, one: _List) -> None:
        """After a turn, or before the first: start the agents that follow it, else the next turn."""
        agents = [
            agent
            for agent in (one.session.agents if one.agent is None else ())
            if agent.after == one.next - 1 and agent.turns
        ]
        one.waits_for = len(agents)
        for agent in agents:
            delay_s = min(agent.delay_s, self._longest_gap_s)
            self._push(self._now_s + delay_s, _List(one.session, agent.turns, agent, one))
        if not agents:
            self._next_turn(one)

    def _next_turn(self, one: _List) -> None:
        if one.next < len(one.turns):
            self._push(max(self._now_s, one.ready_s), one)
        elif one.parent is None:
            self._begin()
        else:
            one.parent.waits_for -= 1
            if not one.parent.waits_for:
                self._next_turn(one.parent)
