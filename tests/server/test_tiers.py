"""All tiers under pressure: what comes back, what goes first, and that no budget is ever exceeded.

HISTATE_ALL_MODES=1 replays figure 7 in every mode of eviction; without it only in the default one, because each other
mode costs a server start.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eval.journal import Replay, read, replay
from eval.servers import Server

from .conftest import FOLDER, Servers, Spec
from .tools import (
    LOGPROB_TOLERANCE,
    PAGE,
    assert_all_returned,
    assert_same,
    cached,
    cold_run,
    details,
    difference,
    floor_page,
    random_tokens,
)  # fmt: skip

pytestmark = pytest.mark.server

# About 3 MiB on the device, 8 MiB on the host of which 2 MiB are in flight: so much more that the device need not let go of copies for
# a long prompt. The SSD holds all sessions of the first test.
SMALL = (
    "--chunked-prefill-size", "4096", "--max-total-tokens", "3072", "--max-mamba-cache-size", "24",
)  # fmt: skip
SIZES = (
    "--histate-ssd-size", "32MiB", "--histate-inflight-size", "2MiB", "--histate-host-size", "8MiB",
)  # fmt: skip
TIERS, LRU, LRU_REFRESH = (
    Spec(
        f"tiers-{mode}",
        (*SMALL, "--histate-eviction", mode, "--histate-policy-log", f"{FOLDER}/policy-{mode}.jsonl"),
        sizes=SIZES,
    )
    for mode in ("score", "lru", "lru-refresh")
)
ALL_MODES = bool(os.environ.get("HISTATE_ALL_MODES"))


@pytest.fixture
def tiers(servers: Servers) -> Server:
    return servers.get(TIERS)


def policy_log(servers: Servers, spec: Spec) -> Path:
    time.sleep(1)  # a thread writes it
    return servers.folder / f"{spec.name.replace('tiers', 'policy')}.jsonl"


def pass_time(server: Server, requests: int, seed: str) -> None:
    """Let requests go by that leave nothing behind: their prompts are shorter than a page."""
    prompts = [random_tokens(10, f"{seed}-time-{index}") for index in range(requests)]
    server.post(
        "/generate", {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    )


# Branches, on the main server.


def test_branches_leave_each_others_states_alone(main: Server) -> None:
    """Twenty rewrites of one context at random points; then all of them again, and the context itself."""
    source = random.Random(4)
    context = random_tokens(16384, "branches")
    before = main.status()["counters"]["intervals_chosen_total"]
    main.generate(context, 1)
    after = main.settle()["counters"]["intervals_chosen_total"]
    (interval,) = [int(name) for name in after if after[name] > before.get(name, 0)]
    assert 0 < interval <= 4096
    points = [source.randrange(100, len(context)) for _ in range(20)]
    variants = [context[:at] + random_tokens(100, f"branch-{index}") for index, at in enumerate(points)]
    first = [cached(main.generate(variant, 1)) for variant in variants]
    main.settle()
    for at, hit in zip(points, first, strict=True):
        assert at // interval * interval <= hit <= floor_page(at)
    again = [main.generate(variant, 4) for variant in variants]
    for variant, answer in zip(variants, again, strict=True):
        assert cached(answer) >= len(variant) - PAGE
    whole = main.generate(context, 4)
    assert cached(whole) >= len(context) - PAGE, "a branch cost the context its last checkpoint"
    # Where the first rewrite of each point resumed, a second one can: nothing on the shared path is gone.
    for index, (at, hit) in enumerate(zip(points, first, strict=True)):
        answer = main.generate(context[:at] + random_tokens(90, f"other branch-{index}"), 1)
        assert cached(answer) >= hit
    for prompt, answer in ((context, whole), *zip(variants[:3], again[:3], strict=True)):
        assert_same(answer, cold_run(main, prompt, 4))
    lost = [floor_page(at) - hit for at, hit in zip(points, first, strict=True)]
    print(f"branches: interval {interval}, lost tokens at the first rewrite {lost}")


# Everything below runs on small budgets.


def test_every_session_comes_back_from_host_or_ssd(tiers: Server) -> None:
    """Four times the device and twice the host. The longest idle return first, then the others way round."""
    status = tiers.status()
    contexts: list[list[int]] = []
    for index in range(42):
        prompt = random_tokens(610 + 3 * index, f"round-{index}")
        contexts.append(prompt + tiers.generate(prompt, 30)["output_ids"])
    working_set = sum(
        floor_page(len(context)) * status["kv_bytes_per_token"] + status["checkpoint_bytes"]
        for context in contexts
    )
    assert working_set >= 4 * status["tiers"]["device"]["total_bytes"]
    assert working_set >= 2 * status["tiers"]["host"]["total_bytes"]

    asked: list[list[tuple[list[int], dict[str, Any]]]] = []
    for turn in range(2):
        asked.append([])
        order = list(enumerate(contexts))
        for index, context in order if turn == 0 else order[::-1]:
            prompt = context + random_tokens(40, f"round-{index}-{turn}")
            answer = tiers.generate(prompt, 8)
            assert cached(answer) >= len(context) - PAGE, (index, turn, details(answer))
            asked[-1].append((prompt, answer))
            contexts[index] = prompt + answer["output_ids"]
    found = [[details(answer) for _, answer in turn] for turn in asked]
    from_host = [sum(one["host"] > 0 for one in turn) for turn in found]
    from_ssd = [sum(one.get("storage", 0) > 0 for one in turn) for turn in found]
    # In the first round each one's KV left the host long before its turn; in the second some is still there.
    assert from_ssd[0] >= 24 and from_ssd[1] >= 6 and from_host[1] > 0, (from_host, from_ssd)
    counters = tiers.settle()["counters"]
    assert counters["kv_restores_total"] >= sum(from_ssd)
    assert sum(counters["ssd_misses_total"].values()) == 0

    worst = 0.0
    for turn_asked in asked:
        tiers.flush()
        for prompt, warm in turn_asked:
            cold = tiers.generate(prompt, 8)
            assert cached(cold) == 0 and warm["output_ids"] == cold["output_ids"]
            worst = max(worst, difference(warm, cold))
    assert worst <= LOGPROB_TOLERANCE
    print(
        f"tiers: {working_set} bytes of sessions; KV from host {from_host}, from ssd {from_ssd} of {len(contexts)}; "
        f"worst difference {worst:.1e}"
    )
    assert_all_returned(tiers)


class Sampler:
    """Samples the status as fast as it answers and the memory of the scheduler process every 10 ms."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._statm = Path(f"/proc/{server.status()['pid']}/statm")
        self._stop = threading.Event()
        self.statuses: list[dict[str, Any]] = []
        self.rss: list[int] = []
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=work) for work in (self._sample_status, self._sample_rss)]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def rss_now(self) -> int:
        return int(self._statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _sample_status(self) -> None:
        while not self._stop.wait(0.01):
            try:
                self.statuses.append(self._server.status())
            except Exception as error:  # kept for the test to look at
                self.errors.append(error)
                return

    def _sample_rss(self) -> None:
        while not self._stop.wait(0.01):
            self.rss.append(self.rss_now())


def clients(server: Server, requests: int, seed: str) -> list[str]:
    """Eight at a time: sessions that grow, are rewritten, or begin. Returns what went wrong."""
    numbers, lock, errors = itertools.count(), threading.Lock(), []

    def work(client: int) -> None:
        source = random.Random(f"{seed}-{client}")
        context = random_tokens(source.randrange(200, 900), f"{seed}-{client}")
        while True:
            with lock:
                number = next(numbers)
            if number >= requests:
                return
            new = [source.randrange(32, 256) for _ in range(source.randrange(20, 300))]
            kind = source.random()
            if kind < 0.3:
                context = context[: source.randrange(1, len(context))] + new
            elif kind < 0.4 or len(context) > 1600:
                context = [*new, *random_tokens(600, f"{seed}-{client}-{number}")]
            else:
                context = context + new
            try:
                context = context + server.generate(context, source.choice([1, 8, 20]))["output_ids"]
            except Exception as error:
                with lock:
                    errors.append(f"request {number} of client {client} ({len(context)} tokens): {error!r}")

    workers = [threading.Thread(target=work, args=(client,)) for client in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


BUDGET_REQUESTS = 200
RSS_NOISE = 16 << 20  # bytes: activations of eight requests, kept by the allocator once they were freed


def test_no_budget_is_ever_exceeded(tiers: Server, servers: Servers) -> None:
    assert not clients(tiers, 24, "budget warm-up")
    started = time.monotonic()
    with Sampler(tiers) as sampler:
        before = sampler.rss_now()
        errors = clients(tiers, BUDGET_REQUESTS, "budget")
    took_s = time.monotonic() - started
    assert not errors and not sampler.errors, (errors[:3], sampler.errors)
    assert len(sampler.statuses) >= 50
    most = {"device": 0.0, "host": 0.0, "ssd": 0.0}
    for status in sampler.statuses:
        device, host, ssd = (status["tiers"][name] for name in most)
        used = {
            "device": device["used_bytes"],
            "host": sum(host[kind]["used_bytes"] for kind in ("kv", "states", "inflight")),
            "ssd": ssd["checkpoints"]["used_bytes"],
        }
        total = {
            "device": device["total_bytes"],
            "host": host["total_bytes"],
            "ssd": ssd["checkpoints"]["total_bytes"],
        }
        entry = max(status["checkpoint_bytes"], host["page_bytes"])
        for name in most:
            assert used[name] <= total[name] + entry, (name, used, total)
            most[name] = max(most[name], used[name] / total[name])
    # Between two samples nothing went further either: these are kept at every change.
    last = sampler.statuses[-1]["tiers"]
    assert 0 < last["host"]["peak_bytes"] <= last["host"]["arena_bytes"]
    assert 0 < last["ssd"]["checkpoints"]["peak_bytes"] <= last["ssd"]["checkpoints"]["total_bytes"]
    files = [file.stat() for file in servers.ssd_dir(TIERS).rglob("*") if file.is_file()]
    assert sum(file.st_blocks * 512 for file in files) <= (32 << 20) + (1 << 20)
    last = sampler.statuses[-1]
    evicted = last["eviction"]["evictions_total"]
    assert all(any(evicted[f"{tier}_{kind}"] for kind in ("bundle", "intermediate")) for tier in most), (
        evicted
    )
    growth = max(sampler.rss) - before
    configured = last["tiers"]["device"]["total_bytes"] + last["tiers"]["host"]["total_bytes"]
    print(
        f"budgets: {len(sampler.statuses)} statuses and {len(sampler.rss)} memory samples in {took_s:.0f} s; at most "
        + ", ".join(f"{name} {share:.1%}" for name, share in most.items())
        + f"; memory {before >> 20} MiB, grew by {growth / (1 << 20):.1f} MiB; evictions {evicted}"
    )
    assert growth <= 1.1 * configured + RSS_NOISE
    assert_all_returned(tiers)


def host_share(server: Server) -> float:
    """Return the used part of the host arena."""
    host = server.status()["tiers"]["host"]
    assert host["kv"]["used_bytes"] + host["states"]["used_bytes"] + host["free_bytes"] == host["arena_bytes"]
    return 1 - host["free_bytes"] / host["arena_bytes"]


def device_share(server: Server) -> float:
    device = server.status()["tiers"]["device"]
    return device["used_bytes"] / device["total_bytes"]


def test_the_host_arena_and_the_device_fill_with_either_load(tiers: Server) -> None:
    """Many short sessions, then a few long ones, then short ones again, without a restart or a flush.

    Each short one ends behind a page that its answer filled: that checkpoint is copied to the host with its KV.
    """
    shares = []
    for turn in range(2):
        for index in range(160):
            tiers.generate(random_tokens(120, f"short-{turn}-{index}"), 12)
        states = tiers.settle()["tiers"]["host"]["states"]
        shares.append((device_share(tiers), host_share(tiers), states["used"]))
        for index in range(8):
            tiers.generate(random_tokens(2000, f"long-{turn}-{index}"), 1)
        states = tiers.settle()["tiers"]["host"]["states"]
        shares.append((device_share(tiers), host_share(tiers), states["used"]))
    print(
        "either load: device and host used, states on the host",
        [f"{device:.1%} {host:.1%} {states}" for device, host, states in shares],
    )
    assert min(device for device, *_ in shares) > 0.9
    assert min(host for _, host, _ in shares) > 0.9
    # The boundary moves and comes back: a state is two pages of 128.
    assert min(states for *_, states in shares[::2]) >= 20 > 10 >= max(states for *_, states in shares[1::2])
    assert_all_returned(tiers)


def test_states_take_room_on_the_host_from_their_read_until_their_request_runs(tiers: Server) -> None:
    """Many short sessions return at once: states are read ahead of their requests, and given up once loaded."""
    prompts = [random_tokens(200, f"return-{index}") for index in range(60)]
    for prompt in prompts:
        tiers.generate(prompt, 1)
    tiers.settle()
    turns = [prompt + random_tokens(70, f"return-turn-{index}") for index, prompt in enumerate(prompts[:24])]
    with Sampler(tiers) as sampler:
        body = {"input_ids": turns, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        answers = tiers.post("/generate", body)
    assert all(cached(answer) >= 192 for answer in answers)
    assert sum(details(answer)["ssd_checkpoint"] > 0 for answer in answers) >= 12
    at_most = max(status["tiers"]["host"]["states"]["used"] for status in sampler.statuses)
    left = tiers.settle()["tiers"]["host"]["states"]["used"]
    print(f"states on the host: at most {at_most}, {left} left")
    assert left <= len(turns), "only the ends of the last answers"
    assert_all_returned(tiers)


class IdleAndActive:
    """One session that has been idle for long, one in the middle of its work, and more and more pressure from others."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.idle = random_tokens(1500, "idle")
        self.active = random_tokens(900, "active")

    def play(self, others: int) -> None:
        self._server.flush()
        self._server.generate(self.idle, 1)
        self.active = self.active[:900]
        tau = int(self._server.status()["config"]["tau"])
        for turn in range(3):
            self._server.generate(self.active, 1)
            pass_time(self._server, tau, f"active-{turn}")
            self.active = self.active + random_tokens(150, f"active-{turn}")
        self._server.generate(self.active, 1)
        self._server.settle()
        for index in range(others):
            self._server.generate(random_tokens(200, f"other-{index}"), 1)

    def found(self, session: list[int]) -> dict[str, int]:
        """Return where the session's next turn finds what it resumes from."""
        answer = self._server.generate(session + random_tokens(50, "next turn"), 1)
        assert cached(answer) >= len(session) - PAGE, "what left the device is in the tiers below"
        return {"cached": cached(answer), **details(answer)}


def test_an_idle_session_goes_whole_before_an_active_one_loses_its_end(tiers: Server) -> None:
    both = IdleAndActive(tiers)
    both.play(0)
    device, token = tiers.status()["tiers"]["device"], tiers.status()["kv_bytes_per_token"]
    fit = (device["total_bytes"] - device["used_bytes"]) // (token * (192 + 123))  # others that fit besides
    seen = []
    for others in range(fit, fit + 12):
        both.play(others)
        active = both.found(both.active)
        assert active["device"] == active["cached"] and active["ssd_checkpoint"] == 0, (others, active, seen)
        both.play(others)
        seen.append(both.found(both.idle)["device"])
        if seen[-1] == 0:
            break
    print(
        f"idle and active: {fit} others fit; tokens of the idle session on the device with each one more: {seen}"
    )
    assert seen[-1] == 0 and both.found(both.active)["cached"]


def test_side_requests_never_cost_the_main_session_its_end(tiers: Server) -> None:
    """Titles and summaries of 64 tokens between the turns of the main session."""
    context = random_tokens(1200, "main session")
    context += tiers.generate(context, 8)["output_ids"]
    token = tiers.status()["kv_bytes_per_token"]
    device_tokens = tiers.status()["tiers"]["device"]["total_bytes"] / token
    left_device = 0
    for turn, sides in enumerate([4] * 12 + [40] * 3 + [200]):
        for side in range(sides):
            tiers.generate(random_tokens(64, f"side-{turn}-{side}"), 1)
        prompt = context + random_tokens(80, f"main session-{turn}")
        answer = tiers.generate(prompt, 8)
        assert cached(answer) >= len(context) - PAGE, (turn, len(context), details(answer))
        whole = details(answer)["device"] == cached(answer) and details(answer)["ssd_checkpoint"] == 0
        assert whole or sides > 4, (turn, details(answer))
        left_device += not whole
        context = prompt + answer["output_ids"]
    # The few side requests of a turn were together more than the device holds.
    assert device_tokens < 4 * 12 * (64 + 123)
    print(f"side requests: the end of the main session had left the device {left_device} times of 16")
    assert_same(answer, cold_run(tiers, prompt, 8))


def test_the_policy_gives_the_same_answers_without_a_server(tiers: Server, servers: Servers) -> None:
    """Every victim and every interval of the tests above, from what the server has written down."""
    status = tiers.settle()
    outcome = replay(read(policy_log(servers, TIERS)))
    assert not outcome.different, outcome.different[:3]
    # Other tests may have left before this one, but the counters and the log are of the same server.
    assert outcome.victims >= sum(status["eviction"]["evictions_total"].values()) > 0
    assert outcome.intervals == sum(status["counters"]["intervals_chosen_total"].values()) > 0
    print(f"policy log: {outcome.events} events, {outcome.victims} victims, {outcome.intervals} intervals")


class Figure7:
    """Figure 7 of the paper: B has S1 after a long prefix, S2 close behind it and its end S3; C has only its end S6.

    Lengths in tokens. Each prompt is ten tokens longer, so that the page before its end gets no checkpoint of its own.
    """

    S1, S2, S3, S6 = 1024, 1024 + PAGE, 1024 + 4 * PAGE, 512
    REST = 10

    def __init__(self, server: Server) -> None:
        self._server = server
        self._b, self._c = random_tokens(self.S3 + self.REST, "B"), random_tokens(self.S6 + self.REST, "C")
        self._filler = self._room_for_all_but_one()

    def prompt(self, name: str) -> list[int]:
        whole = self._c if name == "S6" else self._b
        return whole[: getattr(self, name) + self.REST]

    def play(self) -> dict[str, int]:
        """The accesses of the figure, then one state too many; returns what was evicted from the device."""
        self._visits()
        return self._one_too_many(self._filler)

    def _visits(self) -> None:
        self._server.flush()
        for name in ("S1", "S2", "S6", "S3"):
            self._server.generate(self.prompt(name), 1)
            self._server.settle()

    def _one_too_many(self, filler: int) -> dict[str, int]:
        before = self._evictions()
        self._server.generate(random_tokens(filler + self.REST, "filler"), 1)
        self._server.settle()
        assert self._evictions() == before, "the filler already evicts"
        self._server.generate(random_tokens(10, "too many"), 1)
        after = self._evictions()
        return {name: after[name] - before[name] for name in after if after[name] > before[name]}

    def _evictions(self) -> dict[str, int]:
        counts = self._server.status()["eviction"]["evictions_total"]
        return {name: count for name, count in counts.items() if name.startswith("device_")}

    def _room_for_all_but_one(self) -> int:
        """Return the length of a prompt after which the smallest request needs a little more than what is free."""
        self._visits()
        device, token = (
            self._server.status()["tiers"]["device"],
            self._server.status()["kv_bytes_per_token"],
        )
        free = int((device["total_bytes"] - device["used_bytes"]) // token)
        for filler in range(floor_page(free) - 16 * PAGE, floor_page(free), PAGE):
            if self._one_too_many(filler):
                return filler
            self._visits()
        raise AssertionError("nothing is evicted by any length")


def last_device_victim(log: Path) -> int:
    """Return the position of the state that went from the device last, as the policy log has it."""
    policy, position = Replay(), 0
    for event in read(log):
        if event[:2] == ["victim", "device"] and event[3] is not None:
            _, place, _ = event[3]
            position = 0 if place is None else policy.tree.start(place[0]) + place[1]
        policy.take(event)
    return position


@pytest.mark.parametrize(("spec", "dropped"), [(TIERS, "S2"), (LRU, "S1"), (LRU_REFRESH, "S6")])
def test_figure_7(servers: Servers, spec: Spec, dropped: str) -> None:
    if spec is not TIERS and not ALL_MODES:
        pytest.skip("needs a server of its own: set HISTATE_ALL_MODES=1")
    server = servers.get(spec)
    figure = Figure7(server)
    evicted = figure.play()
    assert sum(evicted.values()) == 1, evicted
    assert last_device_victim(policy_log(servers, spec)) == getattr(Figure7, dropped)
    # What was not dropped is there without a read, and the tiers below have what was.
    for name in ("S1", "S6", "S3", "S2"):
        answer = server.generate(figure.prompt(name) + random_tokens(20, f"return {name}"), 4)
        assert cached(answer) == getattr(figure, name)
        if name != dropped and spec is TIERS:
            assert details(answer)["device"] == cached(answer) and details(answer)["ssd_checkpoint"] == 0
