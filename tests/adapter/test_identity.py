"""The identity of a store: every fact alone gives another directory, equal settings give the same one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout

from sglang_histate.adapter import identity, weights_identity
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.store import layout as store_layout
from sglang_histate.store.layout import Fingerprint

LAYOUT = StateLayout((0, 1, 2), (2, 4, 4), torch.float32, (8, 3), torch.bfloat16)
PAGE_BYTES = 4096


def touch(folder, name: str, text: str, time_ns: int = 10**18) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    os.utime(folder / name, ns=(time_ns, time_ns))


class Facts:
    """Everything the identity is made of, each in a place of its own so that a test can change one alone."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.adapter = folder.parent / "adapter"
        touch(folder, "config.json", '{"layers": 4}')
        touch(folder, "model.safetensors.index.json", "{}")
        touch(folder, "model-1.safetensors", "weights")
        touch(self.adapter, "adapter_config.json", '{"r": 8}')
        touch(self.adapter, "adapter_model.safetensors", "low rank")
        self.layout, self.page_size, self.kv_page_bytes = LAYOUT, 64, PAGE_BYTES
        self.model = SimpleNamespace(
            model_path=str(folder), revision=None, dtype=torch.bfloat16, quantization=None
        )
        self.args = SimpleNamespace(
            json_model_override_args="{}", model_loader_extra_config="{}", load_format="auto", model_impl="auto",
            modelopt_quant=None, quantization_param_path=None, rl_quant_profile=None, weight_version="default",
            random_seed=1,
        )  # fmt: skip
        self.lora = SimpleNamespace(lora_paths=None)
        self.buffers = SimpleNamespace(k=[None] * 2, layout=KVBufferLayout.NHD)
        self.info = SimpleNamespace(
            head_num=4, head_dim=256, v_head_dim=256, dtype=torch.bfloat16, buffers=self.buffers
        )
        self.kv = SimpleNamespace(dtype=torch.bfloat16, host_pool_decls=self._declarations)
        self.parallel = SimpleNamespace(
            pp_rank=0, pp_size=1, attn_tp_rank=0, attn_tp_size=2, attn_cp_rank=0, attn_cp_size=1, attn_dcp_size=1
        )  # fmt: skip
        self.ranks = SimpleNamespace(tp_rank=0, tp_size=2)
        self.mamba = SimpleNamespace(
            linear_attn_backend="triton", linear_attn_prefill_backend=None, linear_attn_decode_backend=None,
            enable_linear_replayssm=False, enable_linear_replayssm_spec=False, enable_int8_mamba_checkpoint=False,
        )  # fmt: skip

    def _declarations(self):
        pool = SimpleNamespace(get_device_pool_infos=lambda: [SimpleNamespace(buffer_info=self.info)])
        return [SimpleNamespace(device_pool=pool)]

    def directory(self, monkeypatch) -> str:
        monkeypatch.setattr(identity, "get_parallel", lambda: self.parallel)
        monkeypatch.setattr(identity, "get_lora", lambda: self.lora)
        monkeypatch.setattr(identity, "get_exec", lambda: SimpleNamespace(mamba=self.mamba))
        allocator = SimpleNamespace(get_kvcache=lambda: self.kv)
        ctx = SimpleNamespace(
            model_config=self.model,
            server_args=self.args,
            params=SimpleNamespace(token_to_kv_pool_allocator=allocator),
            **vars(self.ranks),
        )
        found = identity.store_identity(ctx, self.layout, self.page_size)  # type: ignore[arg-type]
        return Fingerprint.of(found, self.layout.record_layout(self.kv_page_bytes)).directory_name


@pytest.fixture
def facts(tmp_path) -> Facts:
    return Facts(tmp_path / "model")


def _set(place: str, name: str, value):
    def change(facts: Facts, monkeypatch) -> None:
        target = getattr(facts, place) if place else facts
        assert getattr(target, name) != value, "no change"
        setattr(target, name, value)

    return pytest.param(change, id=f"{place}.{name}" if place else name)


def _layout(**changes):
    def change(facts: Facts, monkeypatch) -> None:
        facts.layout = dataclasses.replace(facts.layout, **changes)

    return pytest.param(change, id="state." + ",".join(f"{k}={v}" for k, v in changes.items()))


def _file(name: str, text: str, time_ns: int = 10**18):
    def change(facts: Facts, monkeypatch) -> None:
        touch(facts.folder, name, text, time_ns)

    return pytest.param(change, id=f"file {name} {text} {time_ns}")


def _patched(owner, name: str, value):
    return pytest.param(
        lambda facts, monkeypatch: monkeypatch.setattr(owner, name, value), id=f"{owner.__name__}.{name}"
    )


CHANGES = [
    _file("config.json", '{"layers": 5}'),
    _file("model.safetensors.index.json", '{"a": 1}'),
    _file("hf_quant_config.json", "{}"),
    _file("model-1.safetensors", "weights, more"),
    _file("model-1.safetensors", "weights", 10**18 + 1),
    _file("model-2.safetensors", "more weights"),
    _set("model", "dtype", torch.float16),
    _set("model", "quantization", "fp8"),
    _set("args", "json_model_override_args", '{"rope_theta": 5}'),
    _set("args", "model_loader_extra_config", '{"a": 1}'),
    _set("args", "load_format", "dummy"),
    _set("args", "model_impl", "transformers"),
    _set("args", "modelopt_quant", "fp8"),
    _set("args", "quantization_param_path", "/scales.json"),
    _set("args", "rl_quant_profile", "fp8"),
    _set("args", "weight_version", "17"),
    _set("kv", "dtype", torch.float8_e4m3fn),
    _set("info", "dtype", torch.uint8),
    _set("info", "head_num", 2),
    _set("info", "head_dim", 128),
    _set("info", "v_head_dim", 128),
    _set("buffers", "k", [None] * 3),
    _set("buffers", "layout", KVBufferLayout.HND),
    _set("", "kv_page_bytes", 2 * PAGE_BYTES),
    _set("", "page_size", 128),
    _layout(layer_ids=(0, 1, 3)),
    _layout(temporal_shape=(4, 2, 4)),
    _layout(temporal_dtype=torch.bfloat16),
    _layout(conv_shape=(3, 8)),
    _layout(conv_dtype=torch.float16),
    _layout(encoding=CheckpointDtype.BF16),
    _layout(encoding=CheckpointDtype.INT8),
    _set("ranks", "tp_rank", 1),
    _set("ranks", "tp_size", 4),
    _set("parallel", "pp_rank", 1),
    _set("parallel", "pp_size", 2),
    _set("parallel", "attn_tp_rank", 1),
    _set("parallel", "attn_tp_size", 1),
    _set("parallel", "attn_cp_rank", 1),
    _set("parallel", "attn_cp_size", 2),
    _set("parallel", "attn_dcp_size", 2),
    _set("mamba", "linear_attn_backend", "flashinfer"),
    _set("mamba", "linear_attn_prefill_backend", "flashinfer"),
    _set("mamba", "linear_attn_decode_backend", "flashinfer"),
    _set("mamba", "enable_linear_replayssm", True),
    _set("mamba", "enable_linear_replayssm_spec", True),
    _set("mamba", "enable_int8_mamba_checkpoint", True),
    _set("lora", "lora_paths", ["one=/adapter"]),
    _patched(identity.sglang, "__version__", "0.5.24"),
    _patched(store_layout, "FORMAT_VERSION", store_layout.FORMAT_VERSION + 1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_alone_gives_another_directory(facts, monkeypatch, change) -> None:
    before = facts.directory(monkeypatch)
    change(facts, monkeypatch)
    assert facts.directory(monkeypatch) != before


def test_no_two_of_these_changes_give_the_same_directory(tmp_path, monkeypatch) -> None:
    found = []
    for number, change in enumerate([lambda facts, patch: None, *(one.values[0] for one in CHANGES)]):
        with monkeypatch.context() as patch:
            facts = Facts(tmp_path / str(number))
            change(facts, patch)
            found.append(facts.directory(patch))
    assert len(set(found)) == len(found) == len(CHANGES) + 1


def test_every_fact_of_the_identity_is_changed_by_a_test(facts, monkeypatch) -> None:
    """A fact that is added has to be added above, too."""
    seen: set[str] = set()

    def leaves(value, name: str = "") -> dict[str, object]:
        if isinstance(value, dict):
            return {k: v for key, one in value.items() for k, v in leaves(one, f"{name}.{key}").items()}
        return {name: json.dumps(value)}

    def found() -> dict[str, object]:
        real, kept = Fingerprint.of, []
        with monkeypatch.context() as patch:
            patch.setattr(Fingerprint, "of", lambda one, layout: kept.append(one) or real(one, layout))
            facts.directory(patch)
        return leaves(kept[0])

    before = found()
    for change in CHANGES:
        with monkeypatch.context() as patch:
            changed = Facts(facts.folder.parent / "again")
            facts.__dict__, old = changed.__dict__, facts.__dict__
            change.values[0](facts, patch)
            seen |= {name for name, value in found().items() if before.get(name) != value}
            facts.__dict__ = old
    # Our own scheme has one value; a dummy load's seed is looked at below.
    assert set(before) - seen == {".hash_scheme"}


def test_the_same_facts_give_the_same_directory(tmp_path, monkeypatch) -> None:
    one, other = Facts(tmp_path / "a"), Facts(tmp_path / "b")  # another place, the same files
    other.args.json_model_override_args = " { } "
    assert one.directory(monkeypatch) == other.directory(monkeypatch)
    one.args.json_model_override_args = '{"a": 1, "b": 2}'
    other.args.json_model_override_args = '{"b": 2,"a": 1}'
    assert one.directory(monkeypatch) == other.directory(monkeypatch)
    one.args.random_seed = 7  # says nothing about loaded weights
    assert one.directory(monkeypatch) == other.directory(monkeypatch)


def test_dummy_weights_are_those_of_their_seed(facts, monkeypatch) -> None:
    facts.args.load_format = "dummy"
    before = facts.directory(monkeypatch)
    facts.args.random_seed = 2
    assert facts.directory(monkeypatch) != before


def test_another_process_with_another_hash_seed_finds_the_same_weights(facts) -> None:
    code = "import sys; from sglang_histate.adapter.weights_identity import weights_identity as w; print(w(sys.argv[1], None))"
    wanted = weights_identity.weights_identity(str(facts.folder), None)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(facts.folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split()[-1] == wanted


def test_adapters_by_name_path_and_weights(facts, monkeypatch) -> None:
    path = str(facts.adapter)
    forms = [
        [f"one={path}"],
        {"one": path},
        [{"lora_name": "one", "lora_path": path, "pinned": True}],
        [LoRARef(lora_name="one", lora_path=path)],  # with an id of its own each time
        [LoRARef(lora_name="one", lora_path=path)],
    ]
    found = set()
    for form in forms:
        facts.lora.lora_paths = form
        found.add(facts.directory(monkeypatch))
    assert len(found) == 1
    (before,) = found
    facts.lora.lora_paths = [f"two={path}"]
    assert facts.directory(monkeypatch) != before
    facts.lora.lora_paths = [f"one={path}", f"two={path}"]
    both = facts.directory(monkeypatch)
    facts.lora.lora_paths = [f"two={path}", f"one={path}"]
    assert facts.directory(monkeypatch) == both != before
    touch(facts.adapter, "adapter_model.safetensors", "other low rank")
    assert facts.directory(monkeypatch) != both


def test_a_hub_model_is_its_commit(facts, monkeypatch) -> None:
    found = []
    for path, revision, commit in [
        ("org/model", None, "aaa"),
        ("org/model", None, "bbb"),
        ("org/other", None, "aaa"),
        ("org/model", "v1", None),
        ("org/model", "v2", None),
        ("org/model", None, None),
    ]:
        monkeypatch.setattr(weights_identity, "hub_commit", lambda name, revision, commit=commit: commit)
        facts.model.model_path, facts.model.revision = path, revision
        found.append(facts.directory(monkeypatch))
    assert len(set(found)) == len(found)
    facts.model.revision = "main"  # the same commit by another name
    monkeypatch.setattr(weights_identity, "hub_commit", lambda name, revision: "aaa")
    assert facts.directory(monkeypatch) == found[0]


def test_the_commit_of_a_hub_model_is_read_from_its_cache(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    file = tmp_path / "snapshots" / "0123abc" / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **names: str(file))
    assert weights_identity.hub_commit("org/model", None) == "0123abc"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **names: None)
    assert weights_identity.hub_commit("org/model", None) is None
    assert weights_identity.hub_commit("not a/repository/name", None) is None


def test_a_model_in_one_file(tmp_path) -> None:
    touch(tmp_path, "model.gguf", "weights")
    before = weights_identity.weights_identity(str(tmp_path / "model.gguf"), None)
    touch(tmp_path, "model.gguf", "weights", 10**18 + 1)
    assert weights_identity.weights_identity(str(tmp_path / "model.gguf"), None) != before
