"""The bench: a dry run goes through all steps with torch alone, limits are judged, and what hangs or dies costs one step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from kernels.bench import __main__ as command
from kernels.bench.acceptance import verdicts
from kernels.bench.device import COPIES, quantile
from kernels.bench.steps import TOTAL_S, Step, steps

from .conftest import LIBRARIES
from .test_build import or_skip

ROOT = Path(__file__).resolve().parents[2]

# A machine with torch and a compiler, and nothing else of what a server has.
BARE = """
import importlib.machinery
real = importlib.machinery.PathFinder.find_spec
def found(name, path=None, target=None):
    return None if name.split(".")[0] in ("sglang", "tvm_ffi", "cuda", "xxhash") else real(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(found)
"""


def test_a_dry_run_goes_through_all_steps_with_torch_alone(tmp_path) -> None:
    if not or_skip_host():
        pytest.skip("no C++ compiler")
    (tmp_path / "sitecustomize.py").write_text(BARE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.bench", "--dry-run", "--out", str(tmp_path / "out.json")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert [step["step"] for step in result["steps"]] == list(range(9))
    assert all(step["end"] in ("done", "out of time") for step in result["steps"])
    assert not [row for row in result["rows"] if row.get("ok") is False or "error" in row]
    (machine,) = [row for row in result["rows"] if row["what"] == "machine"]
    assert machine["tvm_ffi"] is False and machine["cuda_bindings"] is False
    paths = {row["path"] for row in result["rows"] if row["what"] in ("d2h", "h2d", "fan_out")}
    assert {f"A{i}" for i in range(6)} | {f"B{i}" for i in range(6)} == {path[:2] for path in paths}
    assert all(verdict["name"] in done.stdout for verdict in result["verdicts"]) and "pass " in done.stdout


def or_skip_host() -> bool:
    try:
        build.build_host(LIBRARIES / "host.so")
    except build.BuildError as error:
        if "no C++ compiler" in str(error):
            return False
        raise
    return True


def test_the_bench_compiles_for_an_h200_and_opens_without_a_gpu() -> None:
    built = or_skip(
        lambda: build.build(LIBRARIES / "bench-sm_90.so", ("90",), ffi=False, with_sources=(COPIES,))
    )
    code = f"""
from kernels.native import open_library
library = open_library({str(built.path)!r})
print(library.bench_attribute(0, 0), library.bench_register(None, 0) != 0)
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["-1", "True"], done.stderr


def test_the_steps_fit_into_the_run() -> None:
    assert [step.number for step in steps()] == list(range(9))
    assert sum(step.limit_s for step in steps()) == TOTAL_S == 480


def test_without_a_gpu_the_bench_says_what_to_do(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_no_device", lambda: "there is no GPU here; --dry-run goes through")
    assert command.main([]) == 1 and "--dry-run" in capsys.readouterr().err
    for wrong in ("9", "x", "-1"):
        with pytest.raises(SystemExit):
            command.main(["--dry-run", f"--steps={wrong}"])


# Limits.

GOOD = [
    {"what": "trial", "ok": True},
    {"what": "link", "way": "d2h", "gb_s": 55.0},
    {"what": "link", "way": "h2d", "gb_s": 54.0},
    {"what": "hbm", "gb_s": 4300.0},
    {"what": "d2h", "path": "A1 batch", "records": 4, "gb_s": 51.0, "ok": True},
    {"what": "d2h", "path": "A3 pack int8", "records": 4, "gb_s": 20.0, "ok": True},
    {"what": "h2d", "path": "B0 loop", "records": 1, "gb_s": 53.0, "ok": True},
    *(
        {"what": "pack", "encoding": encoding, "records": 8, "gb_s": 3500.0}
        for encoding in ("native", "bf16", "int8")
    ),
    *(
        {
            "what": "slowdown",
            "load": "gemm",
            "path": path,
            "pace": pace,
            "slowdown_percent": 0.5,
            "noise_percent": 0.2,
        }
        for path in ("A1 batch", "A2 groups", "A3 pack int8")
        for pace in ("continuous", "8 per second")
    ),
    {"what": "small_copy", "path": "A2 groups", "p95_ms": 0.15},
    {"what": "sanitizer", "tool": "memcheck", "ok": True, "reason": ""},
]


def judged(rows) -> dict[str, bool | None]:
    return {verdict.name.split(",")[0]: verdict.passed for verdict in verdicts(rows)}


def test_a_run_within_all_limits_passes() -> None:
    assert set(judged(GOOD).values()) == {True}
    assert all(verdict.line().startswith("pass") for verdict in verdicts(GOOD))


@pytest.mark.parametrize(
    ("what", "change", "name"),
    [
        ("trial", {"ok": False}, "right bytes"),
        ("h2d", {"ok": False}, "right bytes"),
        ("d2h", {"gb_s": 49.0}, "native records d2h"),
        ("h2d", {"gb_s": 48.0}, "native records h2d"),
        ("pack", {"gb_s": 3000.0}, "pack int8"),
        ("small_copy", {"p95_ms": 0.21}, "4 KiB beside records by groups"),
        ("sanitizer", {"ok": False, "reason": "1 error"}, "compute-sanitizer"),
        ("slowdown", {"slowdown_percent": 2.1}, "slowdown of a matrix product beside copy engine"),
        ("slowdown", {"slowdown_percent": 1.1}, "slowdown of a matrix product beside pack"),
    ],
)
def test_each_limit_can_be_missed(what, change, name) -> None:
    rows = [{**row, **change} if row["what"] == what else row for row in GOOD]
    found = judged(rows)
    assert found[name] is False
    text = [verdict.line() for verdict in verdicts(rows) if verdict.name.startswith(name)]
    assert text[0].startswith("FAIL")


def test_what_was_not_measured_is_no_pass() -> None:
    assert set(judged([]).values()) == {None}
    noisy = [{**row, "noise_percent": 5.0} if row["what"] == "slowdown" else row for row in GOOD]
    assert judged(noisy)["slowdown of a matrix product beside copy engine"] is None
    wrong = [{**row, "ok": False} if row["what"] == "d2h" else row for row in GOOD]
    assert judged(wrong)["native records d2h"] is None  # fast copies of wrong bytes are no copies


def test_pack_is_judged_where_it_cannot_read_from_a_cache() -> None:
    rows = [*GOOD, {"what": "pack", "encoding": "int8", "records": 1, "gb_s": 9000.0}]
    rows += [{"what": "pack", "encoding": "bf16", "records": 16, "gb_s": 1000.0}]
    assert judged(rows)["pack int8"] is True and "3500" in verdicts(rows)[5].measured
    assert judged(rows)["pack bf16"] is False


def test_rows_of_what_failed_are_no_figures() -> None:
    failed = [{"what": what, "path": "A2 groups", "error": "x"} for what in ("small_copy", "d2h")]
    failed += [{"what": "slowdown", "load": "gemm", "pace": "continuous", "path": "A1 batch", "error": "x"}]
    assert judged([{"what": "link", "way": "d2h", "error": "x"}, *failed]) == judged([])


def test_pack_does_not_count_as_the_copy_engine() -> None:
    rows = [row for row in GOOD if row.get("path") != "A1 batch" or row["what"] != "d2h"]
    assert judged(rows)["native records d2h"] is None


def test_quantiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, share) for share in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1, 1, 3, 5, 5]


# Workers that die or hang.

FAKE = """
import json, os, sys, time
rows, numbers = sys.argv[sys.argv.index("--worker") + 1], sys.argv[sys.argv.index("--steps") + 1].split(",")
with open(rows, "a") as file:
    def line(**values):
        file.write(json.dumps(values) + "\\n")
        file.flush()
    for number in map(int, numbers):
        how = {how}.get(number, "")
        if how == "cannot start":
            sys.exit(3)
        line(step=number, begin="x")
        line(step=number, row={{"what": "row", "of": number}})
        if how == "dies":
            file.write('{{"step": 2, "ro')
            file.flush()
            os._exit(9)
        if how == "hangs":
            time.sleep(60)
        line(step=number, end="done", seconds=0.0)
        if how == "fails behind":
            sys.exit(1)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the bench with a worker that does what a step's entry in `how` says, and return the JSON."""
    real = subprocess.Popen

    def go(how: dict[int, str], total: float = 60) -> dict:
        script = tmp_path / "worker.py"
        script.write_text(FAKE.format(how=how))
        monkeypatch.setattr(
            command.subprocess,
            "Popen",
            lambda words, **options: real([sys.executable, str(script), *words[3:]], **options),
        )
        monkeypatch.setattr(command, "GRACE_S", 4.0)  # of a busy machine
        monkeypatch.setattr(
            command, "steps", lambda: [Step(i, f"s{i}", 0.5, lambda bench: None) for i in range(9)]
        )
        out = tmp_path / "out.json"
        status = command.main(
            ["--dry-run", "--library", str(tmp_path / "a.so"), "--out", str(out), "--total", str(total)]
        )
        return {"status": status, **json.loads(out.read_text())}

    return go


def ends(result: dict) -> dict[int, str]:
    return {step["step"]: step["end"] for step in result["steps"]}


def test_a_step_that_ends_the_process_costs_that_step_alone(run) -> None:
    result = run({2: "dies"})
    assert ends(result) == {**dict.fromkeys(range(9), "done"), 2: "the process ended with status 9"}
    assert [row["of"] for row in result["rows"]] == list(range(9)) and result["status"] == 1


def test_a_step_that_hangs_is_ended(run) -> None:
    result = run({4: "hangs"})
    assert ends(result) == {**dict.fromkeys(range(9), "done"), 4: "hung, and was ended"}


def test_a_fault_that_shows_between_two_steps_costs_nothing(run) -> None:
    assert ends(run({3: "fails behind"})) == dict.fromkeys(range(9), "done")


def test_a_worker_that_cannot_start_is_not_tried_for_ever(run) -> None:
    found = ends(run({0: "cannot start", 5: "cannot start"}))
    assert found[0] == found[5] == "the process could not start (status 3)"
    assert all(found[number] == "done" for number in (1, 2, 3, 4, 6, 7, 8))


def test_the_total_is_kept(run) -> None:
    result = run({0: "hangs", 1: "hangs", 2: "hangs", 3: "hangs", 4: "hangs"}, total=3.0)
    assert result["seconds"] < 10 and "the run was out of time" in ends(result).values()
    assert [step["step"] for step in result["steps"]] == list(range(9))
