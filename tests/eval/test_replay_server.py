"""A real server says what was recorded, and the ends of its answers are reused. One start."""

from __future__ import annotations

import asyncio
import random

import pytest

from eval.replay.client import Answer, Client
from eval.replay.probe import find
from eval.replay.recorded_tokens import SERVER_FLAG
from eval.servers import Server

ARGUMENTS = [
    "--demo",
    SERVER_FLAG,
    *("--histate-ssd-size", "8MiB"),
    *("--histate-inflight-size", "2MiB"),
    *("--hicache-ratio", "2"),
    *("--max-total-tokens", "8192"),
    *("--max-running-requests", "4"),
    *("--chunked-prefill-size", "256"),  # prompts are computed in chunks, between which nothing may be forced
]
ENVIRON = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.server
def test_recorded_answers_come_back_and_their_ends_are_cached(tmp_path) -> None:
    draw = random.Random(3)
    questions = [
        ([draw.randrange(256) for _ in range(length)], [draw.randrange(256) for _ in range(output)])
        for length, output in ((10, 1), (64, 130), (200, 2), (700, 90), (1300, 17), (513, 128))
    ]

    async def ask_all() -> tuple[list[Answer], list[Answer]]:
        target = await find(f"{server.url}/v1")
        assert target.sglang
        async with Client(target.base_url, target.model, sglang=True, force=True) as client:
            # All at once: rows of one batch are at different places, some still in their prompt.
            first = await asyncio.gather(*(client.ask(prompt, output) for prompt, output in questions))
            then = [await client.ask(prompt + output + [1] * 70, [2, 3]) for prompt, output in questions]
        return list(first), then

    arguments = [*ARGUMENTS, "--histate-ssd-dir", str(tmp_path / "ssd")]
    with Server(arguments, tmp_path / "server.log", ENVIRON) as server:
        server.wait_ready()
        first, then = asyncio.run(ask_all())
    assert [list(answer.output_ids) for answer in first] == [output for _, output in questions]
    for (prompt, output), answer in zip(questions, then, strict=True):
        # The last token of an answer was never read by the model: nobody has its KV.
        assert answer.cached.total == (len(prompt) + len(output) - 1) // 64 * 64
