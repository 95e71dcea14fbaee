"""Parallel agents that a trace recorded in one list with their parent, told apart by their text.

Later captures have `tool_tokens` 0 and no sub-agent entries: all requests of a session are in one list. In it, a
prompt that keeps less than half of the prompt before it is either another thread or the same one after its text
was summed up. The list decides: a thread that nobody takes up again, and that the next one follows directly, goes
on as that one; only what really alternates is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eval.workloads.sessions import Agent, Session, Turn, common


def split(session: Session) -> Session:
    """Return the session with its alternating threads as agents; its own turns are the thread of the first one.

    A thread's agent starts after the last own turn before it. Where own turns were sent while it ran, they wait for
    it in a closed loop all the same, so that then the order of the two is another than the recorded one. Pauses
    within a thread are the differences of its start times. Recorded agents stay, after the own turn before them.
    """
    threads = _joined(_threads(session.turns))
    if len(threads) < 2:
        return session
    own = threads[0]
    rank = {index: place for place, index in enumerate(own)}
    before: list[int] = []  # for every turn, the place among the own turns of the last one up to it
    for index in range(len(session.turns)):
        before.append(rank.get(index, before[-1] if before else -1))
    turns = _turns(session.turns, own)
    agents = [
        replace(agent, after=before[agent.after] if agent.after >= 0 else -1) for agent in session.agents
    ]
    for number, thread in enumerate(threads[1:], 1):
        after = before[thread[0]]
        parent = turns[after]
        first = session.turns[thread[0]].start_s
        delay = max(first - parent.start_s - parent.service_s, 0.0)
        agents.append(Agent(f"thread_{number:03d}", after, delay, _turns(session.turns, thread)))
    return replace(session, turns=turns, agents=tuple(agents))


def _threads(turns: Sequence[Turn]) -> list[list[int]]:
    """Return the numbers of turns by thread: each goes on the one whose last prompt it keeps most of."""
    threads: list[list[int]] = []
    for index, turn in enumerate(turns):
        best, most = -1, 0
        for number in range(len(threads) - 1, -1, -1):  # of equals the newest
            last = turns[threads[number][-1]].blocks
            shared = common(last, turn.blocks)
            if shared > most and 2 * shared >= len(last):
                best, most = number, shared
        if best < 0:
            threads.append([index])
        else:
            threads[best].append(index)
    return threads


def _joined(threads: list[list[int]]) -> list[list[int]]:
    """Return the threads with each that begins right after another's last turn added to that one."""
    ends: dict[int, list[int]] = {}
    kept: list[list[int]] = []
    for thread in threads:
        goes_on = ends.pop(thread[0] - 1, None)
        if goes_on is None:
            goes_on = []
            kept.append(goes_on)
        goes_on.extend(thread)
        ends[goes_on[-1]] = goes_on
    return kept


def _turns(turns: Sequence[Turn], chosen: Sequence[int]) -> tuple[Turn, ...]:
    """Return turns of one thread, with pauses between them where others were left out."""
    kept: list[Turn] = []
    for place, index in enumerate(chosen):
        turn = turns[index]
        if place and chosen[place - 1] != index - 1:
            last = turns[chosen[place - 1]]
            turn = replace(turn, gap_s=max(turn.start_s - last.start_s - last.service_s, 0.0))
        elif not place:
            turn = replace(turn, gap_s=0.0)
        kept.append(turn)
    return tuple(kept)
