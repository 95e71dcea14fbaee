"""Public bug reports of hybrid prefix caches, replayed small. Numbers and sources: the list that each name points to.

A replay asserts both the hit and warm == cold: most of these reports passed one and failed the other.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest

from eval.servers import Server

from .conftest import MAIN, Servers, Spec
from .test_rewrites import push_out_of_device
from .tools import (
    PAGE,
    Pending,
    assert_all_returned,
    assert_same,
    cached,
    cold_run,
    details,
    floor_page,
    random_tokens,
    warm_equals_cold,
)  # fmt: skip

pytestmark = pytest.mark.server

FIXED = Spec("known-fixed", (*MAIN.arguments, "--histate-interval", "fixed:256"))
INTERVAL = 256


@pytest.fixture
def fixed(servers: Servers) -> Server:
    return servers.get(FIXED)


def test_01_the_same_prompt_again_and_again_hits(fixed: Server) -> None:
    """sglang#21158, sglang#22935, mlx-lm#980 (number 23)."""
    prompt = random_tokens(512, "01")
    fixed.generate(prompt, 1)
    for _ in range(3):
        warm = fixed.generate(prompt, 8)
        assert cached(warm) >= 512 - PAGE
    warm_equals_cold(fixed, prompt, warm)


def test_02_four_prompts_with_one_system_prefix(fixed: Server) -> None:
    """sglang#28222."""
    system = random_tokens(1024, "02")
    fixed.generate(system + random_tokens(128, "02 first"), 1)
    fixed.settle()
    prompts = [system + random_tokens(128, f"02-{index}") for index in range(4)]
    answers = [request.result() for request in [Pending(fixed, prompt, 8) for prompt in prompts]]
    for prompt, warm in zip(prompts, answers, strict=True):
        assert cached(warm) >= 1024 - PAGE
        warm_equals_cold(fixed, prompt, warm)


def test_06_a_prompt_shorter_than_any_chunk_is_reused(fixed: Server) -> None:
    """vllm#51198, vllm#51250."""
    prompt = random_tokens(561, "06")
    fixed.generate(prompt, 1)
    follow = prompt + random_tokens(570, "06 follow")
    warm = fixed.generate(follow, 8)
    assert cached(warm) == floor_page(561)
    warm_equals_cold(fixed, follow, warm)


def test_07_every_prefix_length_is_reused(fixed: Server) -> None:
    """vllm#40696: at least 80 % for every length from four pages on."""
    for length in (64, 100, 256, 300, 450, 527, 528, 600, 979, 1500):
        prefix = random_tokens(length, f"07-{length}")
        fixed.generate(prefix, 1)
        warm = fixed.generate(prefix + random_tokens(80, f"07-new-{length}"), 1)
        assert cached(warm) == floor_page(length)
        if length >= 4 * PAGE:
            assert cached(warm) >= 0.8 * length or length - cached(warm) < PAGE


def test_10_one_state_per_interval_inside_a_prompt(fixed: Server) -> None:
    """vllm#53803."""
    prompt = random_tokens(1024, "10")
    fixed.generate(prompt, 1)
    rewrite = prompt[:700] + random_tokens(64, "10 new")
    warm = fixed.generate(rewrite, 8)
    assert cached(warm) >= 512
    warm_equals_cold(fixed, rewrite, warm)


def test_12_a_growing_chat_prefills_only_what_is_new(fixed: Server) -> None:
    """llama.cpp#20225."""
    chat = random_tokens(300, "12")
    fixed.generate(chat, 1)
    for turn in range(10):
        chat = chat + random_tokens(64, f"12-{turn}")
        warm = fixed.generate(chat, 1)
        assert len(chat) - cached(warm) <= 64 + 2 * PAGE
    warm_equals_cold(fixed, chat, warm)


def test_13_a_block_put_into_the_middle(fixed: Server) -> None:
    """llama.cpp#18497."""
    before, after = random_tokens(2048, "13 a"), random_tokens(2048, "13 b")
    fixed.generate(before + after, 1)
    edited = before + random_tokens(512, "13 c") + after
    warm = fixed.generate(edited, 8)
    assert cached(warm) >= 2048 - PAGE
    fixed.settle()
    again = fixed.generate(edited, 8)
    assert cached(again) >= len(edited) - PAGE - 1
    assert_same(warm, again)
    warm_equals_cold(fixed, edited, warm)


def test_18_no_turn_of_a_chat_misses(fixed: Server) -> None:
    """vmlx#45: hits alternated because states were kept on misses only."""
    chat, hits = random_tokens(700, "18"), []
    for turn in range(6):
        answer = fixed.generate(chat, 16)
        hits.append(cached(answer))
        chat = [*chat, *answer["output_ids"], *random_tokens(150, f"18-{turn}")]
    assert hits[0] == 0 and all(hits[1:]) and hits == sorted(hits)


def test_19_the_longest_state_below_the_match(fixed: Server) -> None:
    """vmlx#91."""
    base = random_tokens(2440, "19")
    for length in (2112, 2224, 2440):
        fixed.generate(base[:length], 1)
    request = base[:2332] + random_tokens(100, "19 new")
    warm = fixed.generate(request, 8)
    # The third prompt resumed at 2176, so its own next state is at 2432, behind the match.
    assert cached(warm) == floor_page(2224)
    warm_equals_cold(fixed, request, warm)


def test_20_a_new_chat_reuses_the_system_prompt_at_once(fixed: Server) -> None:
    """vmlx-swift#219."""
    system = random_tokens(2351, "20")
    fixed.generate(system + random_tokens(137, "20 one"), 8)
    second = system + random_tokens(100, "20 two")
    warm = fixed.generate(second, 8)
    assert cached(warm) >= 2304 - INTERVAL
    warm_equals_cold(fixed, second, warm)


def test_21_what_a_rewrite_wastes(fixed: Server) -> None:
    """ollama#18267: the mean distance from match to hit stays below half an interval."""
    source = random.Random(21)
    wasted = []
    for index in range(12):
        prompt = random_tokens(2500, f"21-{index}")
        fixed.generate(prompt, 1)
        point = source.randrange(500, 2500)
        warm = fixed.generate(prompt[:point] + random_tokens(20, f"21-new-{index}"), 1)
        wasted.append(floor_page(point) - cached(warm))
    assert sum(wasted) / len(wasted) <= INTERVAL / 2 and max(wasted) < INTERVAL


def test_22_a_partial_match_is_not_thrown_away(fixed: Server) -> None:
    """omlx#2812, omlx#3699."""
    prompt = random_tokens(2400, "22")
    fixed.generate(prompt, 1)
    assert fixed.settle()["tiers"]["ssd"]["entries"] > 0
    rewrite = prompt[:1843] + random_tokens(300, "22 new")
    warm = fixed.generate(rewrite, 8)
    assert cached(warm) >= 1792
    warm_equals_cold(fixed, rewrite, warm)


def test_37_what_left_the_device_comes_back_from_the_host(fixed: Server) -> None:
    """sglang#33713, and number 4 (sglang#31181)."""
    prompt = random_tokens(4096, "37")
    fixed.generate(prompt, 1)
    push_out_of_device(fixed, "37")
    follow = prompt + random_tokens(100, "37 new")
    warm = fixed.generate(follow, 8)
    assert cached(warm) == 4096
    assert details(warm)["host"] > 0
    warm_equals_cold(fixed, follow, warm)


def test_45_a_needle_in_the_first_page_from_every_tier(fixed: Server) -> None:
    """sglang#39830, sglang#39862: fluent answers to another prompt after a hit on the host."""
    needle, hay = random_tokens(40, "45 needle"), random_tokens(4000, "45 hay")
    prompt = needle + hay
    other = random_tokens(40, "45 other") + hay
    cold = cold_run(fixed, prompt, 24)
    assert cold_run(fixed, other, 24)["output_ids"] != cold["output_ids"], (
        "the answer does not depend on the needle"
    )
    fixed.flush()
    fixed.generate(prompt, 1)
    device = fixed.generate(prompt, 24)
    assert cached(device) == floor_page(len(prompt) - 1) and details(device)["host"] == 0
    push_out_of_device(fixed, "45")
    host = fixed.generate(prompt, 24)
    assert cached(host) >= 3840 and details(host)["host"] > 0
    fixed.flush()
    fixed.generate([*prompt, *random_tokens(500, "45 tail")], 1)
    ssd = fixed.generate(prompt, 24)
    assert details(ssd)["ssd_checkpoint"] == cached(ssd) >= 3840
    for answer in (device, host, ssd):
        assert_same(answer, cold)


def test_54_asking_again_does_not_see_its_own_answer(fixed: Server) -> None:
    """ik_llama.cpp#1295."""
    prompt = random_tokens(640, "54")
    first = fixed.generate(prompt, 32)
    fixed.settle()
    again = fixed.generate(prompt, 32)
    assert 0 < cached(again) <= len(prompt)
    assert_same(first, again)


def test_72_one_state_is_read_for_one_restore(fixed: Server) -> None:
    """sglang#39856, sglang#26448."""
    prompt = random_tokens(4096, "72")
    fixed.generate(prompt, 1)
    push_out_of_device(fixed, "72")
    before = fixed.settle()["counters"]
    rewrite = prompt[:3000] + random_tokens(100, "72 new")
    warm = fixed.generate(rewrite, 8)
    after = fixed.settle()["counters"]
    assert details(warm)["ssd_checkpoint"] == cached(warm) == 2816
    assert after["ssd_reads_total"] == before["ssd_reads_total"] + 1
    assert after["ssd_fault_ins_total"] == before["ssd_fault_ins_total"] + 1
    warm_equals_cold(fixed, rewrite, warm)


def test_71_zero_reuse_captures_without_reading(fixed: Server) -> None:
    """sglang#27220: random prompts cost no reads and no waits."""
    before = fixed.settle()["counters"]
    for index in range(4):
        assert cached(fixed.generate(random_tokens(1000, f"71-{index}"), 4)) == 0
    after = fixed.settle()["counters"]
    for name in ("ssd_fault_ins_total", "ssd_reads_total", "internal_hits_total"):
        assert after[name] == before[name]


def test_90_the_end_of_an_output_is_reused(fixed: Server) -> None:
    """vllm#56972: a checkpoint at the end of the decode; after the device forgot it the host has it, without a read."""
    prompt = random_tokens(256, "90")
    answer = fixed.generate(prompt, 256)
    fixed.settle()
    push_out_of_device(fixed, "90")
    follow = [*prompt, *answer["output_ids"], *random_tokens(50, "90 new")]
    reads = fixed.settle()["counters"]["ssd_reads_total"]
    warm = fixed.generate(follow, 8)
    assert cached(warm) >= 512 - PAGE
    assert details(warm)["host"] > 0 and details(warm)["ssd_checkpoint"] == 0
    assert fixed.settle()["counters"]["ssd_reads_total"] == reads
    warm_equals_cold(fixed, follow, warm)


def test_98_counters_never_shrink_or_go_negative(fixed: Server) -> None:
    """vllm#38230."""
    seen = fixed.status()["counters"]
    for index in range(3):
        fixed.generate(random_tokens(900, f"98-{index % 2}"), 2)
        time.sleep(0.05)
        now = fixed.status()["counters"]
        for name, value in now.items():
            if isinstance(value, int):
                assert value >= seen[name] >= 0, name
        seen = now


def test_60_nothing_is_left_in_use(fixed: Server) -> None:
    assert_all_returned(fixed)


def test_49_eight_agents_on_a_slow_and_failing_disk(servers: Servers, tmp_path: Path) -> None:
    """sglang#27504, sglang#30321, and number 97 (sglang#35808): a failed read is told from an absent entry."""
    spec = Spec(
        "known-flaky", FIXED.arguments,
        (("HISTATE_TEST_DISK_DELAY_MS", "30"), ("HISTATE_TEST_DISK_FAULT_RATE", "0.3"), ("PATH", _without_compiler(tmp_path))),
    )  # fmt: skip
    server = servers.get(spec)
    bases = [random_tokens(1800, f"49-{index}") for index in range(4)]
    for base in bases:
        server.generate(base, 1)
    server.settle()
    prompts = [bases[i % 4][: 700 + 37 * i] + random_tokens(60, f"49-new-{i}") for i in range(24)]
    answers = []
    for start in range(0, len(prompts), 8):
        running = [Pending(server, prompt, 8) for prompt in prompts[start : start + 8]]
        answers += [request.result() for request in running]
    counters = server.settle()["counters"]
    assert counters["ssd_restored_requests_total"] > 0
    assert counters["ssd_misses_total"]["read_failed"] > 0
    assert counters["ssd_read_misses_total"].get("absent", 0) == 0
    assert sum(counters["ssd_read_misses_total"].values()) == counters["ssd_misses_total"]["read_failed"]
    for prompt, warm in zip(prompts[::4], answers[::4], strict=True):
        warm_equals_cold(server, prompt, warm)
    assert_all_returned(server)


def _without_compiler(folder: Path) -> str:
    """Return a PATH with all programs but compilers, so this server also shows number 82 (Tanguille/cluster#4213)."""
    compiler = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|clang|clang\+\+|nvcc|ninja)(-[\d.]+)?")
    for source in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(source).iterdir() if Path(source).is_dir() else ():
            if compiler.fullmatch(program.name):
                continue
            link = folder / program.name
            link.unlink(missing_ok=True)
            link.symlink_to(program)
    assert all(shutil.which(tool, path=str(folder)) is None for tool in ("cc", "gcc", "g++", "c++", "ninja"))
    return str(folder)
