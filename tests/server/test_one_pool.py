"""One device pool: the boundary between KV and states follows the load, and what was moved is still right."""

from __future__ import annotations

from typing import Any

import pytest

from eval.servers import Server

from .conftest import HOST_SIZE, MAIN, Servers, Spec
from .tools import (
    Pending,
    assert_all_returned,
    assert_same,
    cached,
    cold_run,
    details,
    random_tokens,
    warm_equals_cold,
)  # fmt: skip

pytestmark = pytest.mark.server

# The same bytes as the main server, each kind with its share.
STATIC = Spec("static-split", (*MAIN.arguments, "--histate-static-split"))
TOKENS_PER_STATE = 123  # of the demo model, in bytes of the pool


def device(server: Server) -> dict[str, Any]:
    tier = server.status()["tiers"]["device"]
    assert 0 <= tier["used_bytes"] == tier["kv"]["used_bytes"] + tier["states"]["used_bytes"]
    assert tier["used_bytes"] <= tier["total_bytes"]
    return tier


def share(server: Server, kind: str | None = None) -> float:
    """Return the used part of the budget, of one kind or of both."""
    tier = device(server)
    return (tier if kind is None else tier[kind])["used_bytes"] / tier["total_bytes"]


def fill_with_states(server: Server, seed: str) -> list[list[int]]:
    """Run many short sessions, one state and one or two pages each, until the pool is full. Returns their prompts."""
    prompts = [random_tokens(90, f"{seed}-{index}") for index in range(170)]
    for prompt in prompts:
        assert len(server.generate(prompt, 1)["output_ids"]) == 1
    return prompts


def fill_with_kv(server: Server, seed: str, count: int = 4) -> list[list[int]]:
    """Run a few long sessions; three fill the pool."""
    prompts = [random_tokens(8192, f"{seed}-{index}") for index in range(count)]
    for prompt in prompts:
        assert len(server.generate(prompt, 1)["output_ids"]) == 1
    return prompts


def test_the_status_has_one_budget(main: Server) -> None:
    empty = device(main)
    assert empty["one_pool"] and empty["used_bytes"] == 0
    for kind in ("kv", "states"):
        assert empty[kind]["used"] == 0
        assert 0.98 * empty["total_bytes"] <= empty[kind]["total_bytes"] <= empty["total_bytes"]
    main.generate(random_tokens(640, "status"), 1)
    used = device(main)
    assert used["kv"]["used"] >= 640 and used["states"]["used"] >= 1
    assert used["kv"]["total_bytes"] + used["states"]["used_bytes"] <= used["total_bytes"]


def test_the_boundary_moves_with_the_load_and_back(main: Server) -> None:
    pid = main.status()["pid"]
    states_at_most = []
    for turn in range(2):
        fill_with_states(main, f"moves-{turn}-states")
        assert share(main) > 0.9
        assert share(main, "states") > 0.5
        states_at_most.append(device(main)["states"]["used"])
        fill_with_kv(main, f"moves-{turn}-kv")
        assert share(main) > 0.9
        assert share(main, "kv") > 0.9
    # More states than the share that --max-mamba-cache-size would have been, and as many the second time.
    assert min(states_at_most) > 100 and max(states_at_most) - min(states_at_most) < 10
    assert main.status()["pid"] == pid
    assert_all_returned(main)


def test_states_that_were_moved_are_right(main: Server) -> None:
    prompts = fill_with_states(main, "moved")
    # Holes between the states that stay: each long prompt evicts some and moves others.
    fill_with_kv(main, "mover")
    long_prompt = random_tokens(4000, "moved-long")
    main.generate(long_prompt, 1)
    prompts += fill_with_states(main, "moved again")[-60:]
    fresh = [prompt + random_tokens(70, f"moved-{i}") for i, prompt in enumerate(prompts[-40::8])]
    warm = [main.generate(prompt, 8) for prompt in fresh]
    assert all(cached(answer) >= 64 for answer in warm)
    for prompt, answer in zip(fresh, warm, strict=True):
        warm_equals_cold(main, prompt, answer)


def test_append_and_rewrite(main: Server) -> None:
    prompt = random_tokens(6000, "append")
    first = main.generate(prompt, 80)
    main.settle()
    turn = prompt + first["output_ids"] + random_tokens(100, "append turn")
    appended = main.generate(turn, 16)
    assert cached(appended) >= 6000 // 64 * 64
    rewrite = prompt[:4500] + random_tokens(150, "append rewrite")
    rewritten = main.generate(rewrite, 16)
    assert cached(rewritten) >= 3000
    assert_same(appended, cold_run(main, turn))
    assert_same(rewritten, cold_run(main, rewrite))


def test_restore_through_host_and_ssd_into_a_pool_of_states(main: Server) -> None:
    prompt = random_tokens(8192, "restore")
    first = main.generate(prompt, 70)
    fill_with_kv(main, "restore pusher", 3)
    fill_with_states(main, "restore states")
    main.settle()
    # The end of the output was copied from its slot, wherever the slot was, to the host too.
    turn = prompt + first["output_ids"][:-1] + random_tokens(60, "restore turn")
    resumed = main.generate(turn, 16)
    # Its KV is on the host or, where the states of the short ones have taken that room, on the SSD.
    found = details(resumed)
    assert cached(resumed) == 8256 == found["device"] + found["host"] + found["storage"]
    assert found["device"] < 8256
    rewrite = prompt[:5000] + random_tokens(200, "restore new")
    warm = main.generate(rewrite, 16)
    assert cached(warm) >= 4096 and details(warm)["ssd_checkpoint"] == cached(warm)
    assert_same(resumed, cold_run(main, turn))
    assert_same(warm, cold_run(main, rewrite))


def test_a_prompt_larger_than_all_evictable_kv(main: Server) -> None:
    fill_with_states(main, "large")
    room = device(main)
    prompt = random_tokens(16000, "large prompt")
    assert room["kv"]["total"] < len(prompt) < room["total_bytes"] // 512
    warm = main.generate(prompt, 4)
    assert cached(warm) == 0
    warm_equals_cold(main, prompt, warm)


def test_everything_in_use_is_served_without_being_cached(main: Server) -> None:
    """Eight requests whose KV and states together are more than the pool: nothing can be evicted for the others."""
    prompts = [random_tokens(2900 + 17 * index, f"use-{index}") for index in range(8)]
    tokens = sum(len(prompt) + 64 + 4 * TOKENS_PER_STATE for prompt in prompts)
    assert tokens > device(main)["total_bytes"] // 512
    running = [Pending(main, prompt, 64) for prompt in prompts]
    # Rewrites of what is being computed: hits whose state has to be copied while there is no room for it.
    running += [Pending(main, prompt[:1500] + random_tokens(90, "use"), 24) for prompt in prompts[:3]]
    answers = [request.result() for request in running]
    assert [len(answer["output_ids"]) for answer in answers] == [64] * 8 + [24] * 3
    for prompt, answer in list(zip(prompts, answers, strict=False))[::3]:
        warm_equals_cold(main, prompt, answer)
    assert_all_returned(main)


def test_nothing_is_left_in_use(main: Server) -> None:
    before = device(main)
    assert_all_returned(main)
    after = device(main)
    assert after == before and after["used_bytes"] == 0


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    prompt = random_tokens(5000, "both")
    return [prompt, prompt[:3000] + random_tokens(100, "both new"), random_tokens(300, "both short"), prompt]


def test_a_fixed_split_gives_the_same_answers(main: Server, servers: Servers, asked: list[list[int]]) -> None:
    one_pool = [main.generate(prompt, 16) for prompt in asked]
    total = device(main)["total_bytes"]
    fixed = servers.get(STATIC)
    answers = [fixed.generate(prompt, 16) for prompt in asked]
    for first, second in zip(one_pool, answers, strict=True):
        assert_same(first, second)
        # How much depends on the intervals, which follow from what either server has seen before.
        assert (cached(first) > 0) == (cached(second) > 0)
    tier = device(fixed)
    assert not tier["one_pool"] and abs(tier["total_bytes"] - total) < 0.01 * total
    assert HOST_SIZE  # both hold twice the device bytes on the host
    assert_all_returned(fixed)
