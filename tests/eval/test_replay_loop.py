"""The closed loop, in virtual time: exact, with any number of sessions, in no time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from eval.replay.closed_loop import ClosedLoop
from eval.replay.requests import AgentRequests, Request, SessionRequests
from eval.workloads.order import closed_loop
from eval.workloads.sessions import Agent, Session, Turn
from tests.eval.replay_fakes import random_sessions, request, run_virtually


@dataclass
class Sent:
    request: Request
    eligible_s: float
    start_s: float
    end_s: float = -1.0


def replay(
    sessions: list[SessionRequests],
    live: int,
    seed: int = 0,
    ramp_s: float = 0.0,
    takes_s: float | None = None,
) -> list[Sent]:
    """Return what was sent, in the order it was; an answer takes `takes_s`, or a random time."""
    draw = random.Random(seed)
    sent: list[Sent] = []

    async def send(one: Request, eligible_s: float) -> None:
        loop = asyncio.get_running_loop()
        sent.append(Sent(one, eligible_s, loop.time()))
        mine = sent[-1]
        await asyncio.sleep(draw.uniform(0.1, 4.0) if takes_s is None else takes_s)
        mine.end_s = loop.time()

    run_virtually(ClosedLoop(sessions, live, send, ramp_s).run())
    return sent


def by_list(sent: list[Sent]) -> dict[tuple[str, str], list[Sent]]:
    found: dict[tuple[str, str], list[Sent]] = {}
    for one in sent:
        found.setdefault((one.request.session, one.request.agent), []).append(one)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_is_sent_once_in_order_one_at_a_time_after_its_pause(seed) -> None:
    draw = random.Random(seed)
    sessions = random_sessions(draw, draw.randint(1, 12))
    sent = replay(sessions, draw.randint(1, 5), seed)
    assert sorted(one.request.key for one in sent) == sorted(
        one.key for session in sessions for one in session.all_requests()
    )
    for turns in by_list(sent).values():
        assert [one.request.turn for one in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.eligible_s >= before.end_s + after.request.gap_s - 1e-9
            assert after.start_s == pytest.approx(after.eligible_s)


@pytest.mark.parametrize("seed", range(20))
def test_never_more_sessions_than_allowed_and_none_idle_while_some_wait(seed) -> None:
    draw = random.Random(100 + seed)
    sessions = random_sessions(draw, draw.randint(1, 12))
    live = draw.randint(1, 5)
    sent = replay(sessions, live, seed)
    spans = {}
    for one in sent:
        first, last = spans.get(one.request.session, (one.eligible_s, one.end_s))
        spans[one.request.session] = (min(first, one.eligible_s), max(last, one.end_s))
    for start, _ in spans.values():
        assert sum(begin <= start < end for begin, end in spans.values()) <= live
    # Whoever is not among the first starts when another session ends (what begins with an agent starts unseen).
    ends = {round(end, 6) for _, end in spans.values()}
    for session in sessions[live:]:
        if all(agent.after >= 0 for agent in session.agents):
            assert round(spans[session.name][0], 6) in ends


@pytest.mark.parametrize("seed", range(20))
def test_parents_wait_for_their_agents_and_agents_for_their_parent(seed) -> None:
    draw = random.Random(200 + seed)
    sessions = random_sessions(draw, 8)
    lists = by_list(replay(sessions, 4, seed))
    for session in sessions:
        own = lists[session.name, ""]
        for agent in session.agents:
            turns = lists[session.name, agent.name]
            started_after = own[agent.after].end_s if agent.after >= 0 else 0.0
            assert turns[0].eligible_s >= started_after + agent.delay_s - 1e-9
            if agent.after + 1 < len(own):
                assert own[agent.after + 1].eligible_s >= turns[-1].end_s - 1e-9


def test_the_pause_runs_while_agents_do() -> None:
    agent = AgentRequests("a", 0, 1.0, (request("s", 0, agent="a"),))
    turns = (request("s", 0), request("s", 1, gap_s=2.5))
    short = replay([SessionRequests("s", turns, (agent,))], 1, takes_s=1.0)
    # Turn 0 ends at 1, the agent runs from 2 to 3, the pause ends at 3.5.
    assert [(one.request.agent, one.eligible_s) for one in short] == [("", 0.0), ("a", 2.0), ("", 3.5)]
    long = replay([SessionRequests("s", turns, (agent,))], 1, takes_s=3.0)
    # Turn 0 ends at 3, the pause at 5.5, the agent runs from 4 to 7.
    assert long[-1].eligible_s == 7.0


def test_a_ramp_spreads_the_first_sessions_only() -> None:
    sessions = [SessionRequests(f"s{number}", (request(f"s{number}", 0),)) for number in range(6)]
    sent = replay(sessions, 4, ramp_s=8.0, takes_s=3.0)
    assert [(one.request.session, one.eligible_s) for one in sent] == [
        ("s0", 0.0), ("s1", 2.0), ("s2", 3.0), ("s3", 4.0), ("s4", 5.0), ("s5", 6.0)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_with_the_recorded_times_the_order_is_that_of_the_fixed_loop(seed) -> None:
    draw = random.Random(seed)
    sessions = []
    for number in range(3):  # as many as may be live: the fixed loop knows the end of a turn at its start
        turns = [Turn(1, 1, (), 0.0, draw.uniform(0, 5), draw.uniform(0.1, 5)) for _ in range(4)]
        inner = tuple(Turn(1, 1, (), 0.0, draw.uniform(0, 5), draw.uniform(0.1, 5)) for _ in range(2))
        agents = (Agent("a", 1, draw.uniform(0, 3), inner),)
        sessions.append(Session(f"s{number}", 64, tuple(turns), agents))
    takes = {}
    replayed = []
    for session in sessions:
        for agent, turns in (("", session.turns), *((agent.name, agent.turns) for agent in session.agents)):
            takes |= {(session.name, agent, index): turn.service_s for index, turn in enumerate(turns)}

        def requests(name: str, agent: str, turns: tuple[Turn, ...]) -> tuple[Request, ...]:
            return tuple(
                request(name, i, agent=agent, gap_s=turn.gap_s if i else 0) for i, turn in enumerate(turns)
            )

        replayed.append(
            SessionRequests(
                session.name,
                requests(session.name, "", session.turns),
                tuple(
                    AgentRequests(a.name, a.after, a.delay_s, requests(session.name, a.name, a.turns))
                    for a in session.agents
                ),
            )
        )
    order: list[tuple[str, str, int]] = []

    async def send(one: Request, eligible_s: float) -> None:
        order.append(one.key)
        await asyncio.sleep(takes[one.key])

    run_virtually(ClosedLoop(replayed, 3, send).run())
    assert order == [(step.session.name, step.agent, step.index) for step in closed_loop(sessions, 3, 1e9)]


def test_an_error_stops_everything_and_leaves_no_task_behind() -> None:
    sessions = random_sessions(random.Random(1), 8)
    ended: list[str] = []
    tasks: list[int] = []

    async def send(one: Request, eligible_s: float) -> None:
        if one.session == "s3":
            raise KeyError("gone")
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(one.session)

    async def main() -> None:
        with pytest.raises(KeyError, match="gone"):
            await ClosedLoop(sessions, 4, send).run()
        tasks.append(len(asyncio.all_tasks()))

    run_virtually(main())
    assert set(ended) == {"s0", "s1", "s2"}
    assert tasks == [1]


def test_what_is_no_loop_is_refused() -> None:
    async def send(one: Request, eligible_s: float) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="no closed loop"):
        ClosedLoop([], 0, send)
    with pytest.raises(ValueError, match="no closed loop"):
        ClosedLoop([], 1, send, ramp_s=-1)
    run_virtually(ClosedLoop([], 3, send).run())
