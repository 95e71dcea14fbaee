"""One system from start to file, with a server process that is none: what is sent when, and what is told of it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.eviction.budgets import DEMO_UNITS
from eval.internal_hits.budgets import Units
from eval.internal_hits.systems import Setup
from eval.records import RunFacts, read_run
from eval.replay import engine
from eval.replay.engine import Work, replay_system
from eval.replay.probe import Unusable
from eval.replay.requests import SessionRequests, Shape
from eval.replay.sending import Pace
from eval.replay.systems import SYSTEMS, Bytes, setup_of, split
from tests.eval.replay_fakes import Script, fake_server, request

UNITS = Units(DEMO_UNITS.kv_token, DEMO_UNITS.checkpoint)
BUDGETS = split(Bytes(4 << 20, 8 << 20, 4 << 20, 1 << 20), UNITS, 1000, 2)
SHAPE = Shape(tokens_per_block=4)
SESSIONS = [
    SessionRequests(f"s{n}", tuple(request(f"s{n}", t, prompt=[n, t, *range(68)]) for t in range(2)))
    for n in range(3)
]


class FakeServer:
    """Stands for the process; `url` is the fake's, `calls` what was done with it."""

    url = ""
    calls: list[str] = []  # noqa: RUF012
    script = Script()

    def __init__(self, arguments: list[str], log_file: Path, environ: dict[str, str]) -> None:
        self.calls.append("started")
        self.log_file = log_file
        log_file.write_text("")
        self.process = SimpleNamespace(pid=os.getpgid(0))

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def get(self, path: str) -> str:
        assert path == "/server_info"
        return json.dumps({"max_total_num_tokens": BUDGETS.device_kv_tokens})

    def flush(self) -> None:
        self.calls.append(f"flushed after {len(self.script.bodies)}")

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("stopped")


@contextmanager
def in_thread(script: Script) -> Iterator[str]:
    """Serve from a thread of its own, so that the code under test may run event loops."""
    found: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake_server(script) as url:
            found.append(url)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        done.set()
        thread.join()


def replayed(
    system: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False
) -> Path:
    monkeypatch.setattr(engine, "Server", FakeServer)
    monkeypatch.setattr(engine.machine, "drop_page_cache", lambda: "dropped")
    monkeypatch.setattr("eval.replay.probe._PAUSE_S", 0.01)
    FakeServer.calls, FakeServer.script = [], script
    setup: Setup = setup_of(
        SYSTEMS[system],
        BUDGETS,
        UNITS,
        model=None,
        work_dir=tmp_path / "servers",
        running=2,
        chunk=512,
        scale=1 / 16,
        recorded=True,
    )
    path = tmp_path / "run.jsonl"
    work = Work(SESSIONS, SHAPE, Pace(2), recorded=True, resume=resume)
    run = RunFacts(system, "engine", "w", "c0ffee", "x", {"position": 1})
    with in_thread(script) as url:
        FakeServer.url = url.removesuffix("/v1")
        replay_system(SYSTEMS[system], setup, run, path, work, lambda text: None)
    return path


def test_the_cache_is_empty_before_the_first_request_and_the_facts_are_told(tmp_path, monkeypatch) -> None:
    script = Script()
    run, records = read_run(replayed("stock", script, tmp_path, monkeypatch))
    assert len(records) == 6
    assert not any(record.error for record in records)
    assert FakeServer.calls[0] == "started"
    assert FakeServer.calls[1] == f"flushed after {len(script.bodies) - 6}"
    assert FakeServer.calls[2:] == ["stopped"]
    assert run.facts["ssd_written_bytes"] == 0
    assert run.facts["unequal_bytes"] is None
    assert run.facts["page_cache"] == "dropped"
    assert run.facts["complete"]
    assert run.facts["position"] == 1
    assert "--max-total-tokens" in run.facts["command_line"]
    assert not (tmp_path / "servers" / "disk" / "stock").exists()


def test_a_server_that_cannot_be_measured_is_stopped_and_leaves_no_records(tmp_path, monkeypatch) -> None:
    with pytest.raises(Unusable, match="the server's context 20"):
        replayed("stock", Script(context=20), tmp_path, monkeypatch)
    assert FakeServer.calls == ["started", "stopped"]
    assert not (tmp_path / "run.jsonl").exists()
    with pytest.raises(Unusable, match="no cached tokens"):
        replayed("stock", Script(cached=lambda prompt, times: 0), tmp_path, monkeypatch)


def test_no_hits_are_right_where_there_is_no_cache(tmp_path, monkeypatch) -> None:
    path = replayed("nocache", Script(cached=lambda prompt, times: 0), tmp_path, monkeypatch)
    assert [record.hit for record in read_run(path)[1]] == [0] * 6


def test_a_hit_beyond_the_bound_is_counted(tmp_path, monkeypatch) -> None:
    """First turns have a bound of 0 here, and this server says they were cached."""
    path = replayed("stock", Script(cached=lambda prompt, times: 64), tmp_path, monkeypatch)
    assert read_run(path)[0].facts["hits_beyond_bound"] == 3


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    path = replayed("stock", Script(), tmp_path, monkeypatch)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"session":"s1"' not in line))
    script = Script()
    run, records = read_run(replayed("stock", script, tmp_path, monkeypatch, resume=True))
    assert [body["prompt"][0] for body in script.bodies[-2:]] == [1, 1]
    assert len(records) == 6
    assert run.facts["resumed_requests"] == 4
    assert run.facts["ssd_written_bytes"] == 0  # it has no disk, in both parts


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_server_counts_is_not_told_of_a_run_that_another_one_began(
    resumed, tmp_path, monkeypatch
) -> None:
    nothing = {"used": 0}
    tiers = {
        "device": {"one_pool": True, "total_bytes": 1, "kv": nothing},
        "host": {"arena_bytes": 1, "inflight": {"total_bytes": 1}, "kv": nothing, "states": nothing},
        "ssd": {"checkpoints": nothing},
    }

    def status(self: FakeServer) -> dict[str, Any]:
        counters = {
            "recomputed_tokens_with_kv_total": len(self.script.bodies),
            "intervals_chosen_total": {"256": len(self.script.bodies)},
        }
        inflight = dict.fromkeys(("writes", "reads", "fault_ins", "records_free", "records_total"), 0)
        config = {"ssd_size_bytes": 1}
        units = {"kv_bytes_per_token": 512, "checkpoint_bytes": 62976}
        return {"counters": counters, "inflight": inflight, "tiers": tiers, "config": config, **units}

    monkeypatch.setattr(FakeServer, "status", status, raising=False)
    monkeypatch.setattr("eval.internal_hits.systems._SETTLED_S", 0.05)
    path = replayed("histate", Script(), tmp_path, monkeypatch)
    if resumed:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"session":"s1"' not in line))
        path = replayed("histate", Script(), tmp_path, monkeypatch, resume=True)
    facts = read_run(path)[0].facts
    names = {"counters", "recomputed_with_kv_tokens", "intervals", "status", "ssd_written_bytes"}
    assert names <= set(facts)
    if resumed:
        assert {name: facts[name] for name in names} == dict.fromkeys(names)
    else:
        assert facts["recomputed_with_kv_tokens"] == 6
        assert facts["intervals"] == {"256": 6}
        assert isinstance(facts["ssd_written_bytes"], int)


def test_units_are_asked_of_a_server_that_tells_them(tmp_path, monkeypatch) -> None:
    status: dict[str, Any] = {
        "tiers": {
            "device": {"one_pool": True, "total_bytes": 100},
            "host": {"arena_bytes": 10, "inflight": {"total_bytes": 1}},
        },
        "config": {"ssd_size_bytes": 5},
        "kv_bytes_per_token": 32768,
        "checkpoint_bytes": 51_511_296,
    }
    monkeypatch.setattr(engine, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "status", lambda self: status, raising=False)
    setup = Setup("some/model", 8192, BUDGETS, tmp_path)
    found = engine.learn_units(SYSTEMS["histate"], setup, lambda text: None)
    assert found == Units(32768, 51_511_296)
