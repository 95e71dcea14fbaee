"""Built once, the same bytes each time, repaired when damaged, safe with several builders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3_5ForCausalLM

from sglang_histate.demo import cache, config, demo_facts, ensure_demo_model

from .runner import linear_layers, text_tokens


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_builds_are_bit_identical(folder, tmp_path):
    second = ensure_demo_model(tmp_path)
    assert second != folder
    assert second.name == folder.name
    assert contents(second) == contents(folder)
    assert {path.name for path in tmp_path.iterdir()} == {second.name, f"{second.name}.lock"}


def test_an_intact_model_is_not_built_again(folder, monkeypatch):
    monkeypatch.setattr(cache, "_build", lambda _: pytest.fail("built again"))
    assert ensure_demo_model(folder.parent) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_repaired(folder, tmp_path, monkeypatch, name, damage):
    def copy_of_the_model(target: Path) -> None:
        for file, data in contents(folder).items():
            (target / file).write_bytes(data)

    monkeypatch.setattr(cache, "_build", copy_of_the_model)
    broken = ensure_demo_model(tmp_path)
    data = (broken / name).read_bytes()
    if damage == "flip":
        (broken / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    elif damage == "truncate":
        (broken / name).write_bytes(data[: len(data) // 2])
    else:
        (broken / name).unlink()
    assert contents(ensure_demo_model(tmp_path)) == contents(folder)


def test_what_a_killed_builder_left_is_cleared(folder, tmp_path):
    aside = tmp_path / f"{folder.name}.building"
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half")
    assert contents(ensure_demo_model(tmp_path)) == contents(folder)
    assert not aside.exists()


def test_two_builders_at_once(folder, tmp_path):
    command = [sys.executable, "-m", "sglang_histate.demo"]
    builders = [
        subprocess.Popen(
            command, env={"HISTATE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]  # fmt: skip
    printed = {builder.communicate(timeout=120)[0].decode().strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert printed == {str(tmp_path / folder.name)}
    assert contents(tmp_path / folder.name) == contents(folder)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HISTATE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache._default_cache_dir() == tmp_path / ".cache" / "sglang-histate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache._default_cache_dir() == tmp_path / "xdg" / "sglang-histate"
    monkeypatch.setenv("HISTATE_CACHE_DIR", str(tmp_path / "ours"))
    assert cache._default_cache_dir() == tmp_path / "ours"


def test_loads_without_missing_or_unexpected_weights(folder):
    model, report = Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.max_position_embeddings >= 131072
    assert model.generation_config.eos_token_id == [258, 256]


def test_two_ranks_divide_everything(folder):
    written = json.loads((folder / "config.json").read_text())
    keys = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
            "vocab_size", "intermediate_size")  # fmt: skip
    assert all(written[key] % 2 == 0 for key in keys)
    assert written == config.model_config()


def test_facts(runner):
    facts = demo_facts()
    states = linear_layers(runner.forward(text_tokens(0, 64))[1])
    assert facts.ssm_bytes == sum(layer.recurrent_states[0].nbytes for layer in states) == 49152
    # transformers keeps one more column of the window than the W - 1 that the next token needs.
    columns = config.CONV_KERNEL_SIZE - 1
    assert facts.conv_bytes == sum(layer.conv_states[0][..., -columns:].nbytes for layer in states) == 13824
    assert facts.kv_bytes_per_token == 512
    assert facts.n_s == 123.0
    assert demo_facts("bfloat16").n_s == 109.5
