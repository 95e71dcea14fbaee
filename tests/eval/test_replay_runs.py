"""From sessions to a file of records: times, errors, what is kept of an interrupted run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from eval.internal_hits.client import Cached
from eval.records import Record, RecordsError, RunFacts, read_run
from eval.replay import __main__ as program
from eval.replay.client import Client
from eval.replay.kept import GrowingRun, Kept, keep
from eval.replay.requests import SessionRequests
from eval.replay.sending import Pace, ServerGone, checkpoint_tier, send_all
from tests.eval.replay_fakes import Script, fake_server, request

RUN = RunFacts("fake", "engine", "w", "c0ffee", "python -m eval.replay", {"live": 2})


def sessions(count: int = 4, turns: int = 3, gap_s: float = 0.05) -> list[SessionRequests]:
    """No two prompts are alike."""
    return [
        SessionRequests(
            f"s{number}",
            tuple(
                request(f"s{number}", turn, gap_s=gap_s, prompt=[number, turn, *range(68)])
                for turn in range(turns)
            ),
        )
        for number in range(count)
    ]


def replay(
    path: Path, script: Script, what: list[SessionRequests], live: int = 2, *, resume: bool = False
) -> list[Record]:
    async def main() -> None:
        kept = keep(path, RUN, what) if resume else Kept((), tuple(what))
        growing = GrowingRun(path, RUN, kept.records)
        try:
            async with fake_server(script) as url, Client(url, "fake", sglang=True, force=False) as client:
                await send_all(client, kept.left, Pace(live), growing, "fake", kept.end_s)
        finally:
            growing.close()

    asyncio.run(main())
    return read_run(path)[1]


def test_every_request_is_recorded_with_the_time_it_waited(tmp_path) -> None:
    script = Script(first_after_s=0.02, between_s=0.005)
    records = replay(tmp_path / "r.jsonl", script, sessions())
    assert len(records) == 12
    assert script.most_live == 2
    by_key = {record.key: record for record in records}
    for record in records:
        assert record.eligible_s <= record.sent_s < record.first_token_s < record.end_s
        assert 0.02 <= record.ttft_s < 5
        assert record.ttft_s >= record.first_token_s - record.sent_s
        if record.turn:
            before = by_key[record.session, "", record.turn - 1]
            assert record.eligible_s >= before.end_s + 0.05
    # Two of four sessions start at once, the others when those end: their wait is no part of TTFT.
    assert sorted(by_key[f"s{n}", "", 0].eligible_s < 0.05 for n in range(4)) == [False, False, True, True]


def test_ttft_counts_from_when_a_turn_could_have_been_sent(tmp_path) -> None:
    """A client that is kept from sending in time must not hide it."""
    kept_waiting: list[float] = []

    class Late(Client):
        async def ask(self, prompt, recorded):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.1)
            kept_waiting.append(0.1)
            return await super().ask(prompt, recorded)

    async def main() -> list[Record]:
        growing = GrowingRun(tmp_path / "r.jsonl", RUN, ())
        async with fake_server(Script()) as url, Late(url, "fake", sglang=True, force=False) as client:
            await send_all(client, sessions(1, 2), Pace(1), growing, "fake")
        growing.close()
        return growing.records

    records = asyncio.run(main())
    assert len(kept_waiting) == 2
    assert all(record.ttft_s >= 0.1 and record.sent_s - record.eligible_s >= 0.1 for record in records)


def test_errors_are_counted_and_kept_and_the_session_goes_on(tmp_path) -> None:
    script = Script(fails=lambda body: body["prompt"][1] == 1)
    records = replay(tmp_path / "r.jsonl", script, sessions(3))
    failed = [record for record in records if record.error]
    assert sorted(record.key for record in failed) == [(f"s{n}", "", 1) for n in range(3)]
    assert all("out of luck" in record.error and record.hit == 0 for record in failed)
    assert len(records) == 9


def test_a_dead_server_ends_the_run(tmp_path) -> None:
    with pytest.raises(ServerGone, match="10 requests in a row failed, the last one with"):
        replay(tmp_path / "r.jsonl", Script(fails=lambda body: True), sessions(20))
    assert 10 <= len(read_run(tmp_path / "r.jsonl")[1]) <= 12


def test_whole_sessions_of_an_interrupted_run_are_kept(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    what = sessions(4)
    full = replay(path, Script(), what)
    whole = {"s0", "s1"}
    lines = path.read_text().splitlines()
    kept_lines = [
        line for line in lines[1:] if json.loads(line)["session"] in whole or json.loads(line)["turn"] == 0
    ]
    path.write_text("\n".join([lines[0], *kept_lines, '{"session":"s2","ag']))  # cut off while it was written
    script = Script()
    again = replay(path, script, what, resume=True)
    assert sorted(body["prompt"][0] for body in script.bodies) == [2, 2, 2, 3, 3, 3]
    assert sorted(record.key for record in again) == sorted(record.key for record in full)
    old = [record for record in again if record.session in whole]
    assert old == [record for record in full if record.session in whole]
    end_s = max(record.end_s for record in old)
    assert all(record.eligible_s >= end_s for record in again if record.session not in whole)


def test_records_of_something_else_are_not_resumed(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    GrowingRun(path, RunFacts("fake", "engine", "other", "c", "x"), ()).close()
    with pytest.raises(RecordsError, match="--resume needs the options of the run that was interrupted"):
        keep(path, RUN, sessions())
    assert keep(tmp_path / "none.jsonl", RUN, sessions()).records == ()


def test_facts_are_added_at_the_end_and_the_file_is_whole_before(tmp_path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    growing = GrowingRun(path, RUN, ())
    record = Record("s", "", 0, 0, 0, 1, 2, 70, 3, {"host": 64}, "host", None, 64, False)
    growing.add(record)
    assert read_run(path) == (RUN, [record])
    growing.finish({"complete": True})
    assert read_run(path)[1] == [record]
    assert read_run(path)[0].facts == {"live": 2, "complete": True}
    assert [file.name for file in path.parent.iterdir()] == ["r.jsonl"]


def test_the_state_s_tier_is_the_ssd_or_that_of_the_last_kv() -> None:
    assert checkpoint_tier(Cached()) == ""
    assert checkpoint_tier(Cached(64, 64)) == "device"
    assert checkpoint_tier(Cached(128, 64, 64)) == "host"
    assert checkpoint_tier(Cached(128, 64, 64, 0, 128)) == "ssd"
    assert checkpoint_tier(Cached(128, 64, 0, 64)) == "ssd"


def test_a_url_is_replayed_from_the_command_line(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)  # the main thread's business
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(_session(name)) for name in ("a", "b")) + "\n")
    out = tmp_path / "out"

    async def main(*more: str) -> int:
        async with fake_server(script) as url:
            arguments = [
                "--workload",
                str(trace),
                "--out",
                str(out),
                "--url",
                url,
                "--time-scale",
                "0",
                *more,
            ]
            return await asyncio.to_thread(program.main, arguments)

    script = Script(details=None, cached=lambda prompt, times: 64 if times else 0)
    assert asyncio.run(main("--live", "2", "--label", "mine")) == 0
    run, records = read_run(out / "mine-1.jsonl")
    assert len(records) == 6
    assert run.system == "mine"
    assert run.facts["complete"]
    assert "match no later prompt" in run.facts["outputs"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["systems"]["mine"]["requests"] == 6
    assert "custom_params" not in script.bodies[-1]
    script = Script(context=20)
    assert asyncio.run(main()) == 2
    assert "the server's context 20" in capsys.readouterr().err
    script = Script(cached=lambda prompt, times: None)
    assert asyncio.run(main()) == 2
    assert "does not report cached tokens" in capsys.readouterr().err


def _session(name: str) -> dict[str, object]:
    requests = [
        {
            "t": 10.0 * turn,
            "type": "n",
            "model": "m",
            "in": 640 * (turn + 1),
            "out": 64,
            "hash_ids": list(range(1, 10 * (turn + 1) + 1)),
            "api_time": 1.0,
            "think_time": 9.0,
        }
        for turn in range(3)
    ]
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}
