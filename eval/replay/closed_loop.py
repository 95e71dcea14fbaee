"""The closed loop in real time: so many sessions at once, the next turn after the answer and a pause.

A session's turns are sent one after the other. A turn may be sent (is *eligible*) at the end of the answer before it
plus its pause, and not before the agents started in between have ended; an agent's first turn at the end of the
answer it follows plus its delay. When a session has ended the next one that waits takes its place.

Times are the event loop's, in seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from eval.replay.requests import AgentRequests, Request, SessionRequests

Send = Callable[[Request, float], Coroutine[Any, Any, None]]
"""Send a request that is eligible since a time and return when its answer has ended, well or not. Raises to stop all."""


class ClosedLoop:
    """Sends every turn of the sessions once.

    `ramp_s`: the first `live` sessions start evenly spread over this time, not all at once.

    Raises:
        ValueError: `live` is less than 1 or the ramp negative.
    """

    def __init__(
        self,
        sessions: Sequence[SessionRequests],
        live: int,
        send: Send,
        ramp_s: float = 0.0,
        ended: Callable[[SessionRequests], None] = lambda session: None,
    ) -> None:
        if live < 1 or ramp_s < 0:
            raise ValueError(f"{live} live sessions that start over {ramp_s} s are no closed loop")
        self._waiting = deque(sessions)
        self._live = live
        self._send = send
        self._ramp_s = ramp_s
        self._ended = ended

    async def run(self) -> None:
        """Return when all sessions have ended. What `send` raises ends the loop: other requests are cancelled."""
        start_s = _now_s()
        lanes = min(self._live, len(self._waiting))
        await _together([self._lane(start_s + self._ramp_s * lane / lanes) for lane in range(lanes)])

    async def _lane(self, start_s: float) -> None:
        await _sleep_until(start_s)
        while self._waiting:
            session = self._waiting.popleft()
            await self._session(session, start_s)
            self._ended(session)
            start_s = _now_s()

    async def _session(self, session: SessionRequests, eligible_s: float) -> None:
        for index, request in enumerate(session.requests):
            eligible_s = max(eligible_s, await self._agents(session, index - 1))
            await _sleep_until(eligible_s)
            await self._send(request, eligible_s)
            if index + 1 < len(session.requests):
                eligible_s = _now_s() + session.requests[index + 1].gap_s
        await self._agents(session, len(session.requests) - 1)

    async def _agents(self, session: SessionRequests, after: int) -> float:
        """Run the agents that follow a turn, all at once; return when the last one ended, -inf if there are none."""
        agents = [agent for agent in session.agents if agent.after == after and agent.requests]
        if not agents:
            return float("-inf")
        start_s = _now_s()
        await _together([self._agent(agent, start_s + agent.delay_s) for agent in agents])
        return _now_s()

    async def _agent(self, agent: AgentRequests, eligible_s: float) -> None:
        for index, request in enumerate(agent.requests):
            await _sleep_until(eligible_s)
            await self._send(request, eligible_s)
            if index + 1 < len(agent.requests):
                eligible_s = _now_s() + agent.requests[index + 1].gap_s


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _sleep_until(at_s: float) -> None:
    if (left_s := at_s - _now_s()) > 0:
        await asyncio.sleep(left_s)


async def _together(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all parts; the first error cancels the others and is raised once they have ended."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
