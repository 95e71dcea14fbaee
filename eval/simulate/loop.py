"""The closed loop of sessions: who sends its next request when, given when the answers end.

At most so many sessions live at once, in the order given; a session's successor starts when it has ended. The next
turn of a list comes after the end of the one before and the recorded pause, cut at a cap. Agents that a turn
starts run at the same time, each a list of its own, and the session's next turn waits for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.simulate.jobs import Job, Naming
from eval.workloads.sessions import Agent, Session, Turn


@dataclass(eq=False)
class Turns:
    """A list of turns under way: a session's own or an agent's."""

    session: Session
    turns: Sequence[Turn]
    agent: Agent | None
    parent: Turns | None
    jobs: list[Job]
    next: int = 0
    waits_for: int = 0  # agents it started that have not ended
    ready_s: float = 0.0  # when its next turn would come if no agent were under way


@dataclass(frozen=True)
class Due:
    """The next request of `turns` comes at `at_s`."""

    at_s: float
    turns: Turns

    @property
    def job(self) -> Job:
        return self.turns.jobs[self.turns.next]


class ClosedLoop:
    """Hand out what is due: `start` once, then `ended` whenever an answer has ended.

    Raises:
        ValueError: `live` is less than 1 or the cap is negative.
    """

    def __init__(self, sessions: Sequence[Session], live: int, cap_s: float) -> None:
        if live < 1 or cap_s < 0:
            raise ValueError(f"{live} live sessions and pauses up to {cap_s} s are no closed loop")
        self._waiting = [session for session in reversed(sessions) if session.requests]
        self._live = live
        self._cap_s = cap_s
        self._naming = Naming()

    def start(self) -> list[Due]:
        """Return the first requests of the first sessions, due at time 0."""
        due: list[Due] = []
        for _ in range(self._live):
            due += self._begin(0.0)
        return due

    def ended(self, turns: Turns, now_s: float) -> list[Due]:
        """Return what is due next now that the answer to the list's last request has ended."""
        turns.next += 1
        if turns.next < len(turns.turns):
            turns.ready_s = now_s + min(turns.turns[turns.next].gap_s, self._cap_s)
        return self._go_on(turns, now_s)

    def _begin(self, now_s: float) -> list[Due]:
        if not self._waiting:
            return []
        session = self._waiting.pop()
        jobs = self._naming.jobs(session, "", session.turns)
        return self._go_on(Turns(session, session.turns, None, None, jobs, ready_s=now_s), now_s)

    def _go_on(self, turns: Turns, now_s: float) -> list[Due]:
        agents = [
            agent
            for agent in (turns.session.agents if turns.agent is None else ())
            if agent.after == turns.next - 1 and agent.turns
        ]
        if not agents:
            return self._next(turns, now_s)
        turns.waits_for = len(agents)
        return [
            Due(
                now_s + min(agent.delay_s, self._cap_s),
                Turns(
                    turns.session,
                    agent.turns,
                    agent,
                    turns,
                    self._naming.jobs(turns.session, agent.name, agent.turns),
                ),
            )
            for agent in agents
        ]

    def _next(self, turns: Turns, now_s: float) -> list[Due]:
        while turns.next >= len(turns.turns):
            if turns.parent is None:
                return self._begin(now_s)
            turns = turns.parent
            turns.waits_for -= 1
            if turns.waits_for:
                return []
        return [Due(max(now_s, turns.ready_s), turns)]
