"""Sessions, a clock that waits for nobody, and an OpenAI-compatible server that is none."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from eval.replay.requests import AgentRequests, Request, SessionRequests

PROMPT = 70


def request(
    session: str,
    turn: int,
    *,
    agent: str = "",
    gap_s: float = 0.0,
    prompt: Sequence[int] | None = None,
    output: Sequence[int] = (7, 8, 9),
) -> Request:
    tokens = array("H", range(PROMPT) if prompt is None else prompt)
    return Request(session, agent, turn, tokens, array("H", output), gap_s, 64 if turn else 0, False)


def random_sessions(draw: random.Random, count: int) -> list[SessionRequests]:
    """Sessions of 1 to 5 turns, every second one with agents at random places."""
    found = []
    for number in range(count):
        name = f"s{number}"
        turns = draw.randint(1, 5)
        own = tuple(request(name, turn, gap_s=draw.choice([0.0, 0.5, 3.0])) for turn in range(turns))
        agents = []
        for index in range(draw.randint(0, 3) if number % 2 else 0):
            agent = f"a{index}"
            inner = tuple(
                request(name, turn, agent=agent, gap_s=draw.choice([0.0, 1.0]))
                for turn in range(draw.randint(1, 3))
            )
            agents.append(AgentRequests(agent, draw.randint(-1, turns - 1), draw.choice([0.0, 2.0]), inner))
        found.append(SessionRequests(name, own, tuple(agents)))
    return found


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer at once. Nothing outside the process can be waited for."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now_s = 0.0
        real = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None = None) -> Any:
            if timeout is None:
                raise AssertionError("nothing is left to wait for")
            self.now_s += timeout
            return real(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)


@dataclass
class Script:
    """How the fake answers. `cached(prompt, times seen before)` is reported; None: not at all."""

    sglang: bool = True
    owner: str = "sglang"
    context: int | None = 4096
    first_after_s: float = 0.0
    between_s: float = 0.0
    cached: Callable[[list[int], int], int | None] = lambda prompt, times: 64 if times else 0
    details: dict[str, Any] | None = None
    fails: Callable[[dict[str, Any]], bool] = lambda body: False
    obeys: bool = True
    ends_early: bool = False
    breaks_off: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    live: int = 0
    most_live: int = 0

    def answer(self, body: dict[str, Any]) -> list[int]:
        count = body["max_tokens"]
        if self.obeys and "custom_params" in body:
            return list(body["custom_params"]["recorded"])
        return [5] * count


@asynccontextmanager
async def fake_server(script: Script) -> AsyncIterator[str]:
    """Serve `script` and yield its URL."""

    async def models(_: web.Request) -> web.Response:
        card = {"id": "fake", "object": "model", "created": 0, "owned_by": script.owner}
        if script.context is not None:
            card["max_model_len"] = script.context
        return web.json_response({"object": "list", "data": [card]})

    async def completions(asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        if script.fails(body):
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        times = sum(earlier["prompt"] == body["prompt"] for earlier in script.bodies)
        script.bodies.append(body)
        script.live += 1
        script.most_live = max(script.most_live, script.live)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked)
        ids = script.answer(body)
        await asyncio.sleep(script.first_after_s)
        for number, token in enumerate(ids):
            choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None}
            if script.sglang:
                choice["token_ids"] = [token]
            await response.write(_event({"choices": [choice]}))
            if script.breaks_off and asked.transport is not None:
                asked.transport.close()
            if script.ends_early and number == 0:
                script.live -= 1
                return response
            await asyncio.sleep(script.between_s)
        if script.sglang and script.details is not None:
            await response.write(_event({"choices": [], "sglext": {"cached_tokens_details": script.details}}))
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        cached = script.cached(body["prompt"], times)
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        script.live -= 1
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _event(content: dict[str, Any]) -> bytes:
    whole = {"id": "1", "object": "text_completion", "created": 0, "model": "fake", **content}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"
