"""A step's tail and a write rate in the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.records import read_run
from eval.simulate import __main__ as simulate

LINE = "--workload rewriting --share 10 --select first:8 --device 12GiB --cpu 8GiB --ssd 32GiB --jobs 1"


def run(folder: Path, system: str, *more: str) -> tuple[dict[str, Any], list[Any]]:
    out = folder / "-".join((system, *more)).replace("--", "")
    assert simulate.main([*LINE.split(), "--systems", system, *more, "--out", str(out)]) == 0
    facts, records = read_run(out / f"{system}.jsonl")
    return facts.facts, list(records)


@pytest.mark.parametrize("system", ["histate", "histate-all"])
@pytest.mark.parametrize("mib", [0, 20, 100])
def test_no_more_is_written_than_rate_and_burst_allow(tmp_path: Path, system: str, mib: int) -> None:
    free, _ = run(tmp_path, system)
    facts, records = run(tmp_path, system, "--write-rate", f"{mib}MiB")
    burst = max(5 * mib << 20, 4 * facts["costs"]["state_bytes"]) if mib else 0
    assert facts["ssd_written_bytes"] <= (mib << 20) * facts["makespan_s"] + burst < free["ssd_written_bytes"]
    assert facts["captures"]["write_budget"] > 0 or mib == 100
    assert free["captures"]["write_budget"] == 0
    assert facts["tuning"]["write_rate"] == mib << 20 and free["tuning"]["write_rate"] is None
    assert sum(record.hit for record in records) > 0, "the host has the ends"


def test_scarce_bytes_thin_out_what_is_learned(tmp_path: Path) -> None:
    """The price of a write rises with its scarcity, so fewer positions are planned, not only more refused."""
    planned = []
    for more in ((), ("--write-rate", "40MiB")):
        facts, _ = run(tmp_path, "histate-learned-loss", *more)
        planned.append(sum(int(count) * times for count, times in facts["planned"].items()))
    assert planned[1] < planned[0]


def test_an_end_in_the_tail_needs_no_step_of_its_own(tmp_path: Path) -> None:
    """A first request of 8,256 tokens: one step with a tail of 2,048, two without."""
    trace = tmp_path / "one.jsonl"
    request = {
        "session_id": "s",
        "input_length": 8256,
        "output_length": 4,
        "hash_ids": list(range(17)),
        "timestamp": 0.0,
    }
    trace.write_text(json.dumps(request) + "\n")
    steps = {}
    for system in ("histate", "histate-tail"):
        out = tmp_path / system
        line = ["--workload", str(trace), "--jobs", "1", "--out", str(out), "--systems", system]
        assert simulate.main(line) == 0
        steps[system] = read_run(out / f"{system}.jsonl")[0].facts["gpu_steps"]
    assert steps["histate"] == steps["histate-tail"] + 1
