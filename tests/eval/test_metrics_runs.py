"""What may be compared, and the summary's form."""

from __future__ import annotations

import json

import pytest
from fake_runs import random_run, request, run, tiny, write

from eval.metrics import NotComparable, compare, load, summary
from eval.metrics.runs import ORDER
from eval.metrics.summaries import merged
from eval.records import RecordsError
from eval.replay.systems import SYSTEMS as SERVED
from eval.simulate.systems import SYSTEMS as SIMULATED

PART = {
    "requests", "hit_rate", "reusable_share", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s",
}  # fmt: skip
SYSTEM = PART | {"sensitive", "recomputed_with_kv_tokens", "ssd_written_bytes", "makespan_s", "errors"}


def check_form(found) -> None:
    assert set(found) == {"commit", "workload", "systems"}
    for system in found["systems"].values():
        assert set(system) == SYSTEM and set(system["sensitive"]) == PART
        numbers = [*system.values(), *system["sensitive"].values()]
        assert all(
            one is None or isinstance(one, int | float) for one in numbers if not isinstance(one, dict)
        )
    json.dumps(found, allow_nan=False)


def test_the_summary_of_a_run_worked_out_by_hand() -> None:
    found = summary(tiny())
    check_form(found)
    assert (found["commit"], found["workload"], list(found["systems"])) == (
        "abc1234", "tiny", ["histate", "vllm-disk"],
    )  # fmt: skip
    ours = found["systems"]["histate"]
    assert ours["sensitive"] == {
        "requests": 1, "hit_rate": 0.25, "reusable_share": 0.5, "ttft_mean_s": pytest.approx(0.6),
        "ttft_p50_s": pytest.approx(0.6), "ttft_p95_s": pytest.approx(0.6), "ttft_p99_s": pytest.approx(0.6),
    }  # fmt: skip
    assert (ours["requests"], ours["errors"], ours["recomputed_with_kv_tokens"]) == (4, 0, 400)
    assert ours["ttft_p99_s"] == pytest.approx(1.97) and ours["ssd_written_bytes"] == 5000
    assert found["systems"]["vllm-disk"]["ssd_written_bytes"] is None


@pytest.mark.parametrize(
    "runs",
    [
        [run("histate")],
        [run("histate", request(error="gone"))],
        [run("histate", request())],
        [run("nocache", request(kv=None), source="engine")],
        [random_run("histate", 1), random_run("vllm-disk", 1), random_run("a new one", 1)],
    ],
)
def test_the_form_is_the_same_for_every_run(runs) -> None:
    check_form(summary(runs))


def test_without_a_baseline_nothing_is_said_of_sensitive_requests() -> None:
    assert set(summary(tiny()[:1])["systems"]["histate"]["sensitive"].values()) == {None}
    assert summary(tiny()[:1], "histate")["systems"]["histate"]["sensitive"]["requests"] == 1


def test_merged_summaries_keep_the_form_of_the_first() -> None:
    first, second = summary(tiny()), summary([run("histate", request(), workload="other")])
    assert merged([first, second]) == {**first, "others": [second]}
    with pytest.raises(ValueError, match="no summary"):
        merged([])


def test_rows_have_one_order_whatever_the_files_order() -> None:
    names = [
        "zebra", "none", "hicache-ends", "hicache", "vllm-disk", "histate-lru", "histate-packed", "histate", "infinite",
        "ant",
    ]  # fmt: skip
    expected = [
        "infinite", "histate", "histate-packed", "histate-lru", "vllm-disk", "hicache", "hicache-ends", "none", "ant",
        "zebra",
    ]  # fmt: skip
    assert list(compare([run(name, request()) for name in names]).systems) == expected


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            run("b", request(), workload="other", path="dir/b.jsonl"),
            ["a.jsonl", "dir/b.jsonl", "tiny", "other"],
        ),
        (run("b", request(), ssd_bytes=5, path="b.jsonl"), ["a.jsonl", "b.jsonl", "ssd_bytes 7", "5"]),
        (run("b", request(), model="x", path="b.jsonl"), ["a.jsonl", "b.jsonl", "model demo", "x"]),
        (run("b", request(), running_requests=4, path="b.jsonl"), ["b.jsonl", "running_requests 8", "4"]),
        (run("b", request(), chunk_tokens=512, path="b.jsonl"), ["b.jsonl", "chunk_tokens 8192", "512"]),
        (run("b", request(), source="engine", path="b.jsonl"), ["a.jsonl", "b.jsonl", "engine"]),
        (run("b", request(prompt=999), path="b.jsonl"), ["a.jsonl", "b.jsonl", "1000", "999", "s1 turn 0"]),
        (run("b", request(), request(), path="b.jsonl"), ["b.jsonl", "s1 turn 0", "more than once"]),
    ],
)
def test_what_is_not_one_workload_is_refused_in_one_sentence(second, words) -> None:
    with pytest.raises(NotComparable) as caught:
        compare(
            [
                run("a", request(), ssd_bytes=7, model="demo", running_requests=8, chunk_tokens=8192),
                second,
            ]
        )
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_every_system_that_can_run_has_its_place() -> None:
    assert {*SIMULATED, *SERVED} <= set(ORDER)


def test_no_runs_are_refused() -> None:
    with pytest.raises(NotComparable, match="no run was given"):
        compare([])


def test_files_and_folders_are_read_once(tmp_path) -> None:
    paths = write(tmp_path / "deep" / "er", *tiny())
    assert [one.facts.system for one in load([tmp_path, *paths, tmp_path / "deep" / ".." / "deep"])] == [
        "histate",
        "vllm-disk",
    ]
    assert load(paths)[0].records == tiny()[0].records


def test_a_folder_without_records_and_a_file_that_is_none_are_named(tmp_path) -> None:
    with pytest.raises(RecordsError, match=r"no records \(\*\.jsonl\)"):
        load([tmp_path])
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(RecordsError, match=r"x\.jsonl:1"):
        load([tmp_path])


def test_a_run_that_was_cut_off_is_read_and_what_it_lacks_is_counted(tmp_path) -> None:
    paths = write(tmp_path, *tiny())
    paths[1].write_text(paths[1].read_text()[:-20])
    found = summary(load(paths))
    assert found["systems"]["vllm-disk"]["requests"] == 3
