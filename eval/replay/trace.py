"""What is sent, as sessions again: lengths, pauses and pages after scaling, for other clients.

Every whole page of a prompt is one block of `PAGE` tokens, whatever the recorded blocks were: servers reuse whole
pages, and AIPerf 0.13 takes all blocks to have 64 tokens, whatever the trace says. Whoever makes text of the ids sends
prompts of the lengths that are sent here, alike in as many pages. The rest after the last whole page has no id, so
the part of it that a later prompt goes on with is lost, which makes no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from eval.replay.requests import PAGE, Shape
from eval.workloads.scaling import Scaling
from eval.workloads.sessions import Agent, Session, Turn


def as_sent(sessions: Iterable[Session], shape: Shape) -> Iterator[Session]:
    """Yield the sessions with the lengths, pauses and pages of their requests.

    Turns start at the end of the one before plus the pause, and not before the agents in between have ended; recorded
    durations shrink as pauses do.

    Raises:
        ValueError: see `Scaling`.
    """
    scaling = Scaling(shape.tokens_per_block, shape.vocabulary, PAGE)
    for session in sessions:
        yield _Sent(scaling, shape, session).session()


class _Sent:
    """One session; `scaling` is that of all."""

    def __init__(self, scaling: Scaling, shape: Shape, session: Session) -> None:
        self._scaling = scaling
        self._shape = shape
        self._session = session

    def session(self) -> Session:
        own: list[Turn] = []
        agents: list[Agent] = []
        end_s = agents_end_s = 0.0
        for index in range(-1, len(self._session.turns)):
            if index >= 0:
                turn = self._session.turns[index]
                gap_s = self._pause_s(turn.gap_s) if index else 0.0
                own.append(self._turn(turn, max(end_s + gap_s, agents_end_s), gap_s))
                end_s = own[-1].start_s + own[-1].service_s
            for agent in self._session.agents:
                if agent.after == index:
                    delay_s = self._pause_s(agent.delay_s)
                    turns = self._list(agent.turns, end_s + delay_s)
                    agents.append(replace(agent, delay_s=delay_s, turns=turns))
                    if turns:
                        agents_end_s = max(agents_end_s, turns[-1].start_s + turns[-1].service_s)
        return Session(self._session.name, PAGE, tuple(own), tuple(agents))

    def _list(self, turns: Sequence[Turn], start_s: float) -> tuple[Turn, ...]:
        made: list[Turn] = []
        for turn in turns:
            gap_s = self._pause_s(turn.gap_s) if made else 0.0
            made.append(self._turn(turn, start_s + gap_s, gap_s))
            start_s = made[-1].start_s + made[-1].service_s
        return tuple(made)

    def _turn(self, turn: Turn, start_s: float, gap_s: float) -> Turn:
        length, pages = self._scaling.pages(self._session, turn)
        output = self._scaling.output_tokens(self._session, turn, self._shape.most_output)
        service_s = turn.service_s * self._shape.scale_of_time(self._session)
        return Turn(length, output, pages, start_s, gap_s, service_s)

    def _pause_s(self, recorded_s: float) -> float:
        return self._shape.pause_s(recorded_s, self._session)
