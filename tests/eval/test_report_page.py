"""The page and the command of the report: what it says of whole, partial, empty and lonely runs."""

from __future__ import annotations

import json
import re

import pytest
from fake_runs import random_run, request, run, tiny, write

from eval.metrics import compare, sensitive
from eval.metrics.__main__ import main as metrics_main
from eval.report.__main__ import main
from eval.report.document import page
from eval.report.paths import without_paths


def text(*runs, baseline=None) -> str:
    comparison = compare(runs)
    return page(comparison, sensitive(comparison, baseline), [], "python -m eval.report build/tiny", 1)


def rows(page_text: str, heading: str) -> dict[str, list[list[str]]]:
    """Cells of the tables below a heading, by system."""
    part = page_text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, list[list[str]]] = {}
    for line in part.splitlines():
        if line.startswith("| ") and not line.startswith(("| system", "| ---")):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            found.setdefault(cells[0], []).append(cells[1:])
    return found


def test_the_tables_of_a_run_worked_out_by_hand() -> None:
    made = text(*tiny())
    hits, times = rows(made, "All requests")["histate"]
    assert [cell.split(" ")[0] for cell in hits] == ["4", "25.0", "16.7", "0.0", "8.3", "75.0", "400"]
    assert [cell.split(" ")[0] for cell in times] == ["0.950", "0.800", "1.850", "1.970"]
    hits, times = rows(made, "Reuse-sensitive requests")["histate"]
    assert hits == ["1", "25.0", "0.0", "0.0", "25.0", "50.0", "400"] and times == ["0.600"] * 4
    hits, times = rows(made, "Without each session's first request")["vllm-disk"]
    assert hits[0] == "2" and times[0].startswith("0.700")
    # vllm-disk: mean 1.1 over 0.95; sensitive 1.2 over 0.6
    all_of_it, only = rows(made, "TTFT over histate's")["vllm-disk"]
    assert all_of_it[:3] == ["all", "4", all_of_it[2]] and all_of_it[2].startswith("1.16")
    assert only == ["sensitive", "1", "2.00", "2.00", "2.00", "2.00"]
    assert rows(made, "The whole run")["histate"][0][:6] == ["1", "4", "0", "0", "24", "150.0"]


def test_tiers_of_servers_are_marked_as_each_server_s_own_count() -> None:
    served = text(*(run(name, request(kv=None), source="engine") for name in ("histate", "hicache")))
    for tier in ("device", "host", "ssd"):
        assert f"| {tier}, as each server counts |" in served
    assert "compare them within one system only" in served
    assert "as each server counts" not in text(*tiny())


def test_the_page_says_what_was_run() -> None:
    made = text(*tiny())
    for words in ("# tiny (simulation)", "4 requests of 2 sessions, 2 systems, commit abc1234",
                  "python -m eval.report build/tiny", "python -m eval.simulate --out build/tiny",
                  "ssd_written_bytes: 5000"):  # fmt: skip
        assert words in made
    assert "Read with care" not in made


def test_the_page_begins_with_what_matters() -> None:
    made = text(*tiny())
    assert "p99 TTFT over histate's: vllm-disk 1.00." in made
    assert "histate reuses 50.0 % of what the infinite cache would on reuse-sensitive requests" in made
    assert "p99 TTFT over" not in text(tiny()[0])


def test_facts_of_all_runs_are_told_once() -> None:
    machine = {"cpu": "a", "cores": 2}
    made = text(*(run(name, request(), machine=machine, seed=len(name)) for name in ("histate", "vllm-disk")))
    assert made.count("- machine: ") == 1 and made.count("- seed: ") == 2


def test_a_part_that_all_lack_is_left_out_or_says_so() -> None:
    assert "## Requests that rewrite context" not in text(*tiny())
    assert "## Requests that rewrite context" in text(
        run("histate", request(), request(turn=1, rewrite=True))
    )
    same = [run(name, request(), request("s2")) for name in ("histate", "vllm-disk")]
    assert "No request is one" in text(*same)
    assert "there is no run of the baseline, vllm-disk" in text(tiny()[0])


def test_rewriting_requests_have_ratios_of_their_own() -> None:
    records = [(request(f"s{n}", ttft=1.0), request(f"s{n}", 1, ttft=2.0, rewrite=True)) for n in range(3)]
    ours = run("histate", *(one for pair in records for one in pair))
    slow = [request(f"s{n}", turn, ttft=4.0, rewrite=turn == 1) for n in range(3) for turn in range(2)]
    made = text(ours, run("vllm-disk", *slow))
    _, only = rows(made, "TTFT over histate's")["vllm-disk"]
    assert only[:3] == ["rewriting", "3", "2.00 [2.00, 2.00]"]
    assert "There are 3 of them" in made


def test_one_system_only_is_compared_with_nothing() -> None:
    made = text(tiny()[0])
    assert "1 system," in made and "one system only" in made and "## TTFT over" not in made


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((), "histate has no requests"),
        ((request(error="gone"), request("s2", error="gone")), "All 2 requests of histate failed"),
        ((request(), request("s2", error="gone")), "1 of 2 requests of histate failed"),
        ((request(),), "histate lacks 1 requests that other runs have"),
    ],
)
def test_partial_runs_are_named(records, words) -> None:
    made = text(run("histate", *records), run("vllm-disk", request(), request("s2")))
    assert words in made and "Read with care" in made and "nan" not in made.lower().replace("nanos", "")


def test_runs_of_different_commits_are_named() -> None:
    runs = [run("histate", request()), run("vllm-disk", request(), commit="def5678")]
    assert "different commits" in text(*runs) and "different commits" not in text(*tiny())


def test_without_histate_the_baseline_is_what_times_are_divided_by() -> None:
    runs = [run(name, request()) for name in ("hicache", "stock")]
    assert "## TTFT over hicache's" in text(*runs, baseline="stock").replace("stock's", "hicache's")
    assert "## TTFT over stock's" in text(*runs, baseline="stock")
    assert "## TTFT over hicache's" in text(*runs)


def test_no_path_of_this_machine_is_left() -> None:
    made = text(
        run("histate", request(), command="/opt/x/bin/python -m y --out /home/me/z", dir="/data/ssd/file")
    )
    assert not re.search(r"(opt|home|data)/", made) and "python -m y --out z" in made


def test_paths(tmp_path) -> None:
    assert without_paths(f"--a={tmp_path}/b/c x", tmp_path) == "--a=b/c x"
    assert without_paths(f'"{tmp_path}/b"', tmp_path) == '"b"'
    assert without_paths("PATH=bin:/opt/x/y", tmp_path) == "PATH=bin:y"
    for same in ("http://127.0.0.1:30000/v1", "build/eval/x", "a / b", "1/2", "../shared/x", "s/t, /flag"):
        assert without_paths(same, tmp_path) == same


def test_the_command_writes_and_says_what(tmp_path, capsys) -> None:
    write(tmp_path / "runs", *tiny())
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--name", "x", "--no-plots"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / "x.md")]
    made = (tmp_path / "out" / "x.md").read_text()
    assert "python -m eval.report runs --out out --name x --no-plots" in made and str(tmp_path) not in made


def test_same_runs_same_bytes_and_another_seed_others(tmp_path) -> None:
    write(tmp_path / "runs", random_run("histate", 3), random_run("vllm-disk", 3, share=0.6))
    pages = []
    for seed in ("1", "1", "2"):
        assert main([str(tmp_path / "runs"), "--out", str(tmp_path), "--no-plots", "--seed", seed]) == 0
        pages.append((tmp_path / "tiny-simulation.md").read_text().replace(f"--seed {seed}", ""))
    assert pages[0] == pages[1] != pages[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["runs", "--baseline", "marconi"], "--baseline marconi: there is no run of it"),
        (["runs", "--name", "a/b"], "--name a/b"),
        (["runs", "other"], "compare runs of one workload"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_2(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", *tiny())
    write(tmp_path / "other", run("histate", request(), workload="other"))
    assert main([*arguments, "--no-plots"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_a_long_workload_name_is_a_short_file_name(tmp_path) -> None:
    write(tmp_path / "runs", run("histate", request(), workload="w125; cap 60 s, digest abcdef"))
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path), "--no-plots"]) == 0
    made = (tmp_path / "w125-simulation.md").read_text()
    assert made.startswith("# w125 (simulation)\n\nWorkload: w125; cap 60 s, digest abcdef.\n")


def test_long_facts_are_cut_and_objects_are_words() -> None:
    counters = {f"counter_{number}": number for number in range(500)}
    made = text(run("histate", request(), counters=counters, machine={"cpu": "x", "load": {"before": 1}}))
    assert "- machine: cpu x, load (before 1)" in made
    assert "counter_3 3," in made and "counter_499" not in made and "whole in the records file" in made


def test_all_errors_end_with_1_and_a_page(tmp_path, capsys) -> None:
    write(tmp_path, run("histate", request(error="gone")))
    assert main([str(tmp_path), "--out", str(tmp_path), "--no-plots"]) == 1
    assert "no figures" in capsys.readouterr().err and (tmp_path / "tiny-simulation.md").exists()


def test_the_summary_of_one_folder_and_of_many(tmp_path, capsys) -> None:
    write(tmp_path / "a", *tiny())
    write(tmp_path / "b", run("histate", request(), workload="other"))
    one, many = tmp_path / "deep" / "one.json", tmp_path / "many.json"
    assert metrics_main([str(tmp_path / "a"), "--json", str(one)]) == 0
    assert metrics_main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(many)]) == 0
    assert "All requests of other" in capsys.readouterr().out
    first, both = json.loads(one.read_text()), json.loads(many.read_text())
    assert first["workload"] == "tiny" and [other["workload"] for other in both.pop("others")] == ["other"]
    assert both == first


def test_the_summary_of_nothing_ends_with_1_or_2(tmp_path, capsys) -> None:
    write(tmp_path / "a", run("histate", request(error="gone")))
    assert metrics_main([str(tmp_path / "a")]) == 1
    assert metrics_main([str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err
