"""`histate size`: sizes that the design and the demo model are known to have, capacities that hold, sentences, flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.simulate.costs import Costs
from sglang_histate.cli import main
from sglang_histate.cli.size import trace
from sglang_histate.cli.size.bytes import Dtypes, Sizes, sizes_of
from sglang_histate.cli.size.model import read_model
from sglang_histate.cli.size.plan import Machine, expected_interval, plan
from sglang_histate.cli.size.weights import Weights
from sglang_histate.config import CheckpointDtype, config_from_flags, split_flags
from sglang_histate.demo.cache import ensure_demo_model
from sglang_histate.demo.facts import demo_facts
from sglang_histate.policy.interval import DEFAULT_INTERVALS, NO_INTERVAL, choose_interval
from sglang_histate.policy.residence import MAX_PRESSURE, MIN_PRESSURE

GIB = 1 << 30
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "Qwen3.5-9B"
# Qwen3.5-9B as far as sizes go.
QWEN_9B: dict[str, Any] = json.loads((EXAMPLE / "config.json").read_text(encoding="utf-8"))["text_config"]
MACHINE = ("--device", "80GiB", "--host", "256GiB", "--ssd", "2TiB")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": QWEN_9B})
    )
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["size", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["size", *argv]) == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1, shown
    return shown.err


def test_the_sizes_that_the_design_counts_with(qwen, capsys) -> None:
    found = said(capsys, "--model", str(qwen), *MACHINE)
    rank = found["per_rank"]
    assert rank["kv_token_bytes"] == 32_768
    assert rank["checkpoint_bytes"] == rank["stored_bytes"] == 51_511_296
    assert round(rank["checkpoint_in_kv_tokens"]) == 1572
    assert rank["slab_bytes"] == 51_515_392 and rank["kv_pages_per_slab"] == 24


@pytest.mark.parametrize(("encoding", "stored"), [("bf16", 26_345_472), ("int8", 14_155_776)])
def test_encodings_change_what_the_ssd_holds_and_nothing_else(qwen, capsys, encoding, stored) -> None:
    native = said(capsys, "--model", str(qwen), *MACHINE)
    found = said(capsys, "--model", str(qwen), *MACHINE, "--checkpoint-dtype", encoding)
    assert found["per_rank"]["stored_bytes"] == stored
    assert found["tiers"]["ssd"]["checkpoints"] > native["tiers"]["ssd"]["checkpoints"]
    assert found["tiers"]["device"] == native["tiers"]["device"]
    assert found["command"][-4:-2] == ["--histate-checkpoint-dtype", encoding]


def test_the_demo_model_has_the_sizes_of_its_facts(capsys) -> None:
    argv = ("--model", str(ensure_demo_model()), "--device", "1GiB", "--host", "1GiB", "--ssd", "1GiB")
    rank = said(capsys, *argv, "--dtype", "float32", "--conv-dtype", "float32")["per_rank"]
    facts = demo_facts()
    assert rank["kv_token_bytes"] == facts.kv_bytes_per_token
    assert rank["checkpoint_bytes"] == facts.checkpoint_bytes
    assert rank["checkpoint_in_kv_tokens"] == pytest.approx(facts.n_s, abs=0.05)


def test_weights_come_from_files_then_from_the_index_then_from_the_shape(qwen, capsys) -> None:
    by_shape = said(capsys, "--model", str(qwen), *MACHINE)
    # 6.92e9 weights in matrix products and two matrices of 248,320 x 4,096, each of two bytes.
    assert by_shape["weight_bytes"] == pytest.approx(2 * (6.92e9 + 2 * 248320 * 4096), rel=0.002)
    (qwen / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 12345}}')
    assert said(capsys, "--model", str(qwen), *MACHINE)["weight_bytes"] == 12345
    (qwen / "model-00001.safetensors").write_bytes(b"x" * 77)
    assert said(capsys, "--model", str(qwen), *MACHINE)["weight_bytes"] == 77
    assert said(capsys, "--model", str(qwen), *MACHINE, "--weights", "3GiB")["weight_bytes"] == 3 * GIB


def test_the_estimate_of_the_demo_models_weights_is_close_to_its_file() -> None:
    folder = ensure_demo_model()
    shape = read_model(folder)
    in_file = (folder / "model.safetensors").stat().st_size / 4
    assert shape.all_weights == pytest.approx(in_file, rel=0.05)


def test_experts_count_whole_for_memory_and_in_part_for_time(tmp_path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    text = {**QWEN_9B, **experts, "shared_expert_intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5MoeForCausalLM"], **text}))
    shape = read_model(tmp_path)
    one = 3 * 4096 * 512
    assert shape.mlp_weights - shape.mlp_active == 32 * 6 * one
    assert shape.mlp_active == 32 * (2 * one + 4096 * 8 + 3 * 4096 * 256 + 4096)


def test_ranks_share_heads_and_the_tiers_hold_the_whole(qwen, capsys) -> None:
    one = said(capsys, "--model", str(qwen), *MACHINE)
    eight = said(capsys, "--model", str(qwen), *MACHINE, "--tp", "8")
    assert eight["per_rank"]["checkpoint_bytes"] * 8 == one["per_rank"]["checkpoint_bytes"]
    # Four KV heads on eight ranks: each is there twice.
    assert eight["per_rank"]["kv_token_bytes"] * 4 == one["per_rank"]["kv_token_bytes"]
    assert eight["command"][eight["command"].index("--histate-ssd-size") + 1] == "256GiB"
    assert eight["tiers"]["ssd"]["size_bytes"] <= 2 << 40


def test_the_flags_are_ones_that_the_server_takes(qwen, capsys) -> None:
    command = said(capsys, "--model", str(qwen), *MACHINE, "--checkpoint-dtype", "int8", "--tp", "2")[
        "command"
    ]
    ours, rest = split_flags(command[3:])
    config = config_from_flags(ours)
    assert config.ssd_size_bytes == 1 << 40 and config.host_size_bytes == 256 * GIB
    assert config.checkpoint_dtype is CheckpointDtype.INT8
    assert rest[:2] == ["--model-path", str(qwen)] and "--tp-size" in rest


@pytest.mark.parametrize(
    ("changed", "argv", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, (), ("--model", "Qwen3ForCausalLM", "Qwen3NextForCausalLM")),
        ({"architectures": None}, (), ("--model", "unknown architecture")),
        ({"linear_key_head_dim": None}, (), ("--model", "linear_key_head_dim")),
        ({"layer_types": ["full_attention"] * 32}, (), ("--model", "0 of its 32 layers")),
        ({"num_experts": 4}, (), ("--model", "moe_intermediate_size")),
        ({"intermediate_size": None}, (), ("--model", "intermediate_size")),
        ({"dtype": "int4"}, (), ("int4", "--dtype")),
        *(
            ({name: wrong}, (), ("--model", name, "damaged"))
            for name, wrong in (
                ("head_dim", "a"), ("head_dim", -1), ("full_attention_interval", 0), ("layer_types", 5), ("dtype", 5),
                ("mamba_ssm_dtype", "int8"), ("mlp_only_layers", 5), ("shared_expert_intermediate_size", "x"),
            )
        ),
        ({"architectures": {"a": 1}}, (), ("--model", "unknown architecture")),
        ({}, ("--tp", "3"), ("--tp 3", "16 attention heads")),
        ({"num_key_value_heads": 3}, ("--tp", "2"), ("--tp 2", "KV heads")),
        ({}, ("--mamba-ssm-dtype", "bfloat16", "--checkpoint-dtype", "int8"), ("--checkpoint-dtype int8", "native")),
        ({}, ("--device", "8GiB"), ("--device 8.00GiB", "weights", "--tp")),
        ({}, ("--host", "300MiB"), ("--host 300.00MiB", "at least")),
        ({}, ("--ssd", "20MiB"), ("--ssd 20.00MiB", "no checkpoint")),
        ({}, ("--trace", "codex", "--cost", "nonsense=1"), ("--cost", "nonsense")),
        ({}, ("--trace", "/no/such.jsonl"), ("--trace /no/such.jsonl", "there is no")),
    ],
)  # fmt: skip
def test_what_cannot_be_sized_is_one_sentence(tmp_path, capsys, changed, argv, words) -> None:
    config = {"architectures": ["Qwen3_5ForCausalLM"], **QWEN_9B, **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = refused(capsys, "--model", str(tmp_path), *MACHINE, *argv)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("content", [None, "no json", "[1]"])
def test_a_file_that_is_no_configuration(tmp_path, capsys, content) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert f"--model {tmp_path}" in refused(capsys, "--model", str(tmp_path), *MACHINE)


def test_a_name_as_the_server_takes_it_is_told_from_a_path(tmp_path, capsys) -> None:
    assert "hf download Qwen/Qwen3.5-9B config.json" in refused(
        capsys, "--model", "Qwen/Qwen3.5-9B", *MACHINE
    )
    for path in (str(tmp_path / "none"), "./none", "models/of/mine"):
        assert "hf download" not in refused(capsys, "--model", path, *MACHINE)


@pytest.mark.parametrize("argv", [("--tp", "0"), ("--page-size", "100"), ("--device", "80GB"), ("--ssd", "0"), ("--mem-fraction-static", "2")])  # fmt: skip
def test_bad_usage(qwen, capsys, argv) -> None:
    assert main(["size", "--model", str(qwen), *MACHINE, *argv]) == 2
    assert argv[0] in capsys.readouterr().err


def test_without_the_simulator_a_trace_is_refused_before_anything_else(qwen, capsys, monkeypatch) -> None:
    monkeypatch.setattr(trace.importlib.util, "find_spec", lambda name: None)
    assert "in a clone" in refused(capsys, "--model", str(qwen), *MACHINE, "--trace", "codex")


def _sizes(ranks: int = 1, encoding: CheckpointDtype = CheckpointDtype.NATIVE) -> Sizes:
    folder = ensure_demo_model()
    return sizes_of(read_model(folder), Dtypes("float32", "float32", "float32", encoding), ranks, 64)


@settings(max_examples=200, deadline=None)
@given(
    device=st.integers(16 << 20, 1 << 40),
    host=st.integers(64 << 20, 1 << 40),
    ssd=st.integers(1 << 20, 1 << 43),
    ranks=st.sampled_from([1, 2]),
    encoding=st.sampled_from(CheckpointDtype),
    session=st.integers(1, 1 << 20),
)
def test_nothing_promised_is_more_than_the_bytes_hold(device, host, ssd, ranks, encoding, session) -> None:
    sizes = _sizes(ranks, encoding)
    found = plan(Machine(device, host, ssd, 0.85, 8192), sizes, 1 << 20, session)
    assert found.inflight_bytes * ranks <= host and found.ssd_bytes * ranks <= ssd
    for tier, given_bytes in zip(found.tiers, (device * ranks, host, ssd), strict=True):
        assert 0 < tier.size_bytes <= given_bytes
        if tier.name == "ssd":
            assert tier.checkpoints * sizes.slab_bytes * ranks <= given_bytes
            continue
        assert tier.kv_tokens * sizes.kv_token_bytes * ranks <= tier.size_bytes
        assert tier.checkpoints * sizes.checkpoint_bytes * ranks <= tier.size_bytes
        used = session * sizes.kv_token_bytes + sizes.checkpoint_bytes
        assert tier.sessions * used * ranks <= tier.size_bytes


@given(
    segment=st.integers(1, 200_000),
    state_tokens=st.floats(1, 5000),
    kv_tokens=st.integers(1, 10**9),
    checkpoints=st.integers(1, 10**6),
)
def test_an_expected_interval_is_one_that_the_policy_chooses_under_its_own_pressure(
    segment, state_tokens, kv_tokens, checkpoints
) -> None:
    found = expected_interval(segment, state_tokens, kv_tokens, checkpoints)
    assert MIN_PRESSURE <= found.pressure <= MAX_PRESSURE
    chosen = choose_interval(segment, DEFAULT_INTERVALS, state_tokens, found.pressure)
    if found.interval == NO_INTERVAL:
        assert chosen == NO_INTERVAL or chosen > DEFAULT_INTERVALS[-2]
    else:
        assert found.pressure == min(
            max(kv_tokens / (checkpoints * found.interval), MIN_PRESSURE), MAX_PRESSURE
        )
        assert chosen != NO_INTERVAL and chosen <= found.interval


def test_more_ssd_never_widens_the_expected_interval() -> None:
    widths = [
        expected_interval(8192, 1572.0, 1 << 20, count).interval or 1 << 30
        for count in (10, 100, 1000, 10000)
    ]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


def test_the_costs_of_the_9b_model_are_those_of_the_simulator(qwen) -> None:
    shape = read_model(qwen)
    sizes = sizes_of(shape, Dtypes("bfloat16", "bfloat16", "float32", CheckpointDtype.NATIVE), 1, 64)
    found, usual = trace.costs_of(shape, sizes, Weights(shape.all_weights * 2, "")), Costs()
    for name, value in vars(usual).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01), name


def test_a_trace_is_simulated_under_every_policy(qwen, capsys, tmp_path) -> None:
    lines = [
        {"session_id": f"s{n % 3}", "timestamp": n * 1000, "input_length": 512 * (4 + n), "output_length": 8,
         "hash_ids": list(range(n % 3 * 100, n % 3 * 100 + 4 + n))}
        for n in range(9)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = said(capsys, "--model", str(qwen), *MACHINE, "--trace", str(path))["simulation"]
    assert set(found["systems"]) == set(trace.SYSTEMS)
    assert found["systems"]["none"]["hit_rate"] == 0 < found["systems"]["histate"]["hit_rate"]
    assert main(["size", "--model", str(qwen), *MACHINE, "--trace", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "simulated on H100" in shown and "histate-lru" in shown and "--histate-host-size 256GiB" in shown
