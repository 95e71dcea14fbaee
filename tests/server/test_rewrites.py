"""An agent rewrites its context: the first rewrite already resumes from a checkpoint inside the old prompt."""

from __future__ import annotations

import random

import pytest

from eval.servers import Server

from .conftest import MAIN, Servers
from .tools import (
    Checkpoints,
    assert_all_returned,
    assert_same,
    cached,
    cold_run,
    details,
    floor_page,
    random_tokens,
)  # fmt: skip

pytestmark = pytest.mark.server


def push_out_of_device(server: Server, seed: str) -> None:
    """Fill the device pool with other prompts, so that everything before them is on the host only."""
    status = server.status()
    # The end of a session is worth up to tau requests, so let that many go by; too short to leave anything behind.
    short = [random_tokens(10, f"{seed}-age-{index}") for index in range(int(status["config"]["tau"]) + 20)]
    server.post("/generate", {"input_ids": short, "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    room = status["tiers"]["device"]["total_bytes"] / status["kv_bytes_per_token"]  # tokens
    for index in range(int(room) // 7000 + 2):
        server.generate(random_tokens(7000, f"{seed}-{index}"), 1)


def test_first_rewrite_of_a_long_prompt_resumes_inside_it(main: Server) -> None:
    prompt = random_tokens(8192, "first")
    assert cached(main.generate(prompt)) == 0
    main.settle()
    rewrite = prompt[:5000] + random_tokens(200, "new")
    warm = main.generate(rewrite, 16)
    assert cached(warm) >= 4096
    assert details(warm)["ssd_checkpoint"] == cached(warm)
    assert_same(warm, cold_run(main, rewrite))


def test_a_checkpoint_still_in_flight_serves_the_rewrite(main: Server) -> None:
    prompt = random_tokens(8192, "no wait")
    main.generate(prompt, 1)
    rewrite = prompt[:5000] + random_tokens(200, "no wait new")
    warm = main.generate(rewrite, 8)
    assert cached(warm) >= 4096
    assert_same(warm, cold_run(main, rewrite, 8))


def test_ten_random_rewrite_points_lose_at_most_half_an_interval(main: Server) -> None:
    source = random.Random(20)
    losses = []
    for index in range(10):
        main.flush()
        prompt = random_tokens(8192, f"ten-{index}")
        before = main.status()["counters"]["intervals_chosen_total"]
        main.generate(prompt, 1)
        after = main.settle()["counters"]["intervals_chosen_total"]
        (interval,) = [int(name) for name in after if after[name] > before.get(name, 0)]
        assert interval > 0
        point = source.randrange(1000, 8192)
        warm = main.generate(prompt[:point] + random_tokens(100, f"ten-new-{index}"), 1)
        losses.append((floor_page(point) - cached(warm)) / interval)
        assert 0 <= losses[-1] < 1
    print("losses in intervals:", [round(loss, 2) for loss in losses])
    assert sum(losses) / len(losses) <= 0.5


def test_rewrite_of_a_prompt_that_left_the_device(main: Server, servers: Servers) -> None:
    checkpoints = Checkpoints(main, servers.ssd_dir(MAIN))
    prompt = random_tokens(8192, "pushed")
    main.generate(prompt, 1)
    push_out_of_device(main, "pusher")
    before = main.settle()["counters"]
    checkpoints.mark()
    rewrite = prompt[:5000] + random_tokens(200, "pushed new")
    warm = main.generate(rewrite, 16)
    counters = main.settle()["counters"]
    assert cached(warm) >= 4096
    assert details(warm)["ssd_checkpoint"] == cached(warm)
    assert details(warm)["host"] > 0
    assert details(warm)["host"] + details(warm)["device"] == cached(warm)
    assert counters["ssd_restored_requests_total"] == before["ssd_restored_requests_total"] + 1
    assert counters["ssd_restored_tokens_total"] == before["ssd_restored_tokens_total"] + cached(warm)
    assert counters["ssd_read_bytes_total"] > before["ssd_read_bytes_total"]
    captured_warm = checkpoints.written()

    main.flush()
    checkpoints.mark()
    cold = main.generate(rewrite, 16)
    assert cached(cold) == 0
    assert_same(warm, cold)
    captured_cold = checkpoints.written()
    common = captured_warm.keys() & captured_cold.keys()
    positions = sorted(captured_warm[key].at_token for key in common)
    assert floor_page(len(rewrite)) in positions
    for key in common:
        assert captured_warm[key].at_token == captured_cold[key].at_token
        assert captured_warm[key].payload == captured_cold[key].payload, (
            f"the state at {captured_warm[key].at_token} after a restore differs from an uninterrupted run"
        )


def test_rewrites_of_rewrites_stay_right(main: Server) -> None:
    context = random_tokens(3000, "chain")
    asked = []
    for turn in range(5):
        main.generate(context, 8)
        asked.append(context)
        cut = 2500 - 300 * turn
        context = context[:cut] + random_tokens(600, f"chain-{turn}")
    main.settle()
    warm = [main.generate(prompt, 8) for prompt in asked]
    assert all(cached(answer) > 0 for answer in warm)
    for prompt, answer in zip(asked, warm, strict=True):
        assert_same(answer, cold_run(main, prompt, 8))


def test_nothing_is_left_in_use(main: Server) -> None:
    assert_all_returned(main)
