"""What the measurement of the scheduler's CPU time sends, and how it times; no server."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest

from eval.scheduler_cpu.__main__ import PARTS, PROBE, TURN_TOKENS, TURNS, Result, _mean, in_order, sessions

SECOND_NS = 1_000_000_000


class Clock:
    """CPU time of the thread that moves only when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def work(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(clock, monkeypatch) -> Iterator[ModuleType]:
    """The probe as a new module, with that clock."""
    monkeypatch.delenv("HISTATE_PROBE_FILE", raising=False)
    spec = importlib.util.spec_from_file_location("probe_under_test", PROBE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time_ns=lambda: clock.now_ns))
    yield module


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_of_a_session_begins_with_the_one_before(seed) -> None:
    found = sessions(3, seed)
    assert [len(prompts) for prompts in found] == [TURNS] * 3
    for prompts in found:
        before: list[int] = []
        for prompt in prompts:
            assert prompt[: len(before)] == before
            assert TURN_TOKENS[0] <= len(prompt) - len(before) <= TURN_TOKENS[1]
            assert all(0 <= token < 256 for token in prompt[len(before) :])
            before = prompt


def test_sessions_are_a_seed_s_own() -> None:
    assert sessions(3, 7) == sessions(3, 7)
    assert sessions(2, 7) == sessions(3, 7)[:2]
    heads = [tuple(prompts[0][:64]) for seed in range(4) for prompts in sessions(4, seed)]
    assert len(set(heads)) == 16


@pytest.mark.parametrize(("count", "live"), [(6, 3), (5, 2), (2, 8), (1, 1)])
def test_sessions_take_turns_and_each_stays_in_order(count, live) -> None:
    prompts = [[[number, turn] for turn in range(TURNS)] for number in range(count)]
    ordered = in_order(prompts, live)
    assert sorted(map(tuple, ordered)) == sorted((n, t) for n in range(count) for t in range(TURNS))
    for number in range(count):
        assert [turn for n, turn in ordered if n == number] == list(range(TURNS))
        places = [place for place, (n, _) in enumerate(ordered) if n == number]
        group = min(live, count - number // live * live)
        assert {after - before for before, after in pairwise(places)} == {group}
    # a group begins when the one before it has ended
    assert [n // live for n, _ in ordered] == sorted(n // live for n, _ in ordered)


def test_a_part_s_time_is_summed_and_its_calls_are_counted(probe, clock) -> None:
    def work(seconds: float, *, more: float = 0.0) -> str:
        clock.work(seconds + more)
        return "done"

    call = probe.timed("schedule", work)
    clock.work(100)
    assert call(2) == call(3, more=0.5) == "done"
    assert probe.sums_ns == {"schedule": 5.5 * SECOND_NS}
    assert probe.counts == {"schedule": 2}
    assert call.__name__ == "work"


def test_the_model_s_time_is_no_part_of_it(probe, clock) -> None:
    model = probe.forward(lambda: clock.work(50))

    def launch() -> None:
        clock.work(1)
        model()
        model()
        clock.work(2)

    probe.timed("launch", launch)()
    model()  # outside of any part: must not be taken from the next one
    probe.timed("finish", lambda: clock.work(4))()
    assert probe.sums_ns == {"launch": 3 * SECOND_NS, "finish": 4 * SECOND_NS}


def test_a_part_inside_a_part_leaves_the_model_s_time_out_of_itself(probe, clock) -> None:
    model = probe.forward(lambda: clock.work(50))

    def inner() -> None:
        clock.work(1)
        model()

    timed_inner = probe.timed("launch", inner)

    def outer() -> None:
        model()
        timed_inner()

    probe.timed("schedule", outer)()
    assert probe.sums_ns["launch"] == SECOND_NS


def test_a_part_that_raises_is_counted_too(probe, clock) -> None:
    def fail() -> None:
        clock.work(1)
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        probe.timed("receive", fail)()
    assert (probe.sums_ns, probe.counts) == ({"receive": SECOND_NS}, {"receive": 1})


def test_sums_are_written_when_the_scheduler_is_idle_after_new_requests(probe, clock, tmp_path) -> None:
    file, idles = tmp_path / "probe.json", []
    idle = probe.writing(lambda: idles.append(1), file)
    finish = probe.timed("finish", lambda: clock.work(1))
    idle()
    assert not file.exists()  # no request yet
    finish()
    idle()
    written = json.loads(file.read_text())
    assert (written["ns"], written["calls"]) == ({"finish": SECOND_NS}, {"finish": 1})
    assert written["thread"] == threading.current_thread().name
    file.unlink()
    idle()
    assert not file.exists()  # nothing new
    finish()
    idle()
    assert json.loads(file.read_text())["calls"] == {"finish": 2}
    assert len(idles) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["probe.json"]


def test_the_probe_and_the_command_mean_the_same_parts(probe) -> None:
    assert tuple(probe.PARTS) == PARTS

    class Scheduler:
        def ingest_requests(self) -> str:
            return "r"

        get_next_batch_to_run = run_batch = process_batch_result = on_idle = ingest_requests

    probe.instrument(SimpleNamespace(__name__=probe.SCHEDULER, Scheduler=Scheduler), PROBE / "nowhere")
    one = Scheduler()
    assert [getattr(one, name)() for name in probe.PARTS.values()] == ["r"] * 4
    assert probe.counts == dict.fromkeys(PARTS, 1)


def test_rounds_are_put_together_by_requests() -> None:
    one = Result("a", 10, 50, 100, dict.fromkeys(PARTS, 100.0), 7)
    two = Result("a", 30, 50, 300, dict.fromkeys(PARTS, 500.0), 3)
    both = _mean([one, two])
    assert (both.requests, both.cached_tokens, both.prompt_tokens, both.steps) == (40, 100, 400, 10)
    assert both.per_request == 4 * 600.0 / 40
    assert both.row(both.per_request).split()[-1] == "1.000"
