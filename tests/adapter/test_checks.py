"""Refusals: each by one sentence that names a flag and the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from sglang_histate.adapter.checks import (
    SUPPORTED_ARCHITECTURES,
    check_arguments,
    check_encoding,
    check_model,
    check_resolved,
)
from sglang_histate.adapter.refusal import Refusal, leave_message, open_mailbox, read_message
from sglang_histate.config import CheckpointDtype, config_from_flags


def arguments(**changes) -> SimpleNamespace:
    """The record as the launcher leaves it: SGLang's defaults and ours."""
    names = ServerArgs.__struct_fields__[::-1]
    fields = dict(zip(names, ServerArgs.__struct_defaults__[::-1], strict=False))
    fields.update(page_size=64, enable_hierarchical_cache=True, radix_cache_backend="histate")
    unknown = set(changes) - set(names)
    assert not unknown, f"SGLang has no {unknown}"
    return SimpleNamespace(**{**fields, **changes})


def one_sentence(caught, flag: str) -> None:
    text = str(caught.value)
    assert flag in text and "\n" not in text and "--disable-histate" in text


def test_our_own_defaults_pass() -> None:
    check_arguments(arguments())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
        ({"enable_int8_mamba_checkpoint": True}, "--enable-int8-mamba-checkpoint"),
        ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
        ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"histate_static_split": True, "enable_unified_memory": True}, "--histate-static-split"),
        ({"enable_unified_memory": True, "attention_backend": "torch_native"}, "--histate-static-split"),
        ({"enable_unified_memory": True, "decode_attention_backend": "dual_chunk"}, "--histate-static-split"),
        (
            {"enable_unified_memory": True, "device": "cpu", "attention_backend": "triton"},
            "--attention-backend",
        ),
        (
            {"histate_checkpoint_dtype": "bf16", "mamba_ssm_dtype": "bfloat16"},
            "--histate-checkpoint-dtype bf16",
        ),
        ({"histate_checkpoint_dtype": "int8", "mamba_ssm_dtype": "float16"}, "--mamba-ssm-dtype float32"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file"),
        ({"hicache_host_memory_mode": "buffer_only"}, "--hicache-host-memory-mode buffer_only"),
        ({"hicache_write_policy": "write_back"}, "--hicache-write-policy write_back"),
        ({"radix_cache_backend": "other"}, "--radix-cache-backend other"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"page_size": 1}, "--page-size 1"),
        ({"page_size": 96}, "--page-size 96"),
        ({"chunked_prefill_size": 100}, "--chunked-prefill-size 100"),
    ],
)
def test_arguments(changes, flag) -> None:
    with pytest.raises(Refusal) as caught:
        check_arguments(arguments(**changes))
    one_sentence(caught, flag)


@pytest.mark.parametrize(
    "changes",
    [{"page_size": 128}, {"page_size": None}, {"chunked_prefill_size": -1}, {"chunked_prefill_size": None}],
)
def test_arguments_that_are_fine(changes) -> None:
    check_arguments(arguments(**changes))


def test_a_forced_rust_core(monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust")
    with pytest.raises(Refusal) as caught:
        check_arguments(arguments())
    one_sentence(caught, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rust")


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_mis": True},
        {"enable_pdmux": True},
        {"enable_two_batch_overlap": True},
        {"elastic_ep_backend": "mooncake"},
    ],
)
def test_forwards_that_go_round_the_capture_calls(changes) -> None:
    """Each splits or replaces the forward pass, so that planned == captured would stop the server at a request."""
    with pytest.raises(Refusal):
        check_arguments(arguments(**changes))


def check_all(view, model, config) -> None:
    check_model(model, view.model_path)
    check_resolved(view, config)


def resolved(
    architecture: str = "Qwen3NextForCausalLM", intervals: str | None = None, tail: int = 0, **changes
):
    view = SimpleNamespace(
        model_path="m",
        page_size=64,
        chunked_prefill_size=8192,
        mamba_radix_cache_strategy="extra_buffer",
        linear_attn_backend="triton",
        linear_attn_prefill_backend=None,
    )
    view.__dict__.update(changes)
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    flags = {"histate_ssd_dir": "/s", "histate_step_tail": tail, "histate_intervals": intervals}
    return view, model, config_from_flags(flags)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_supported_models(architecture) -> None:
    check_all(*resolved(architecture))


@pytest.mark.parametrize(
    ("case", "flag"),
    [
        (resolved("LlamaForCausalLM"), "--model-path m is a LlamaForCausalLM"),
        (resolved("KimiLinearForCausalLM"), "--model-path m is a KimiLinearForCausalLM"),
        (resolved(page_size=16), "--page-size 16"),
        (resolved(chunked_prefill_size=1000), "--chunked-prefill-size 1000"),
        (resolved(mamba_radix_cache_strategy="no_buffer"), "--mamba-radix-cache-strategy no_buffer"),
        (
            resolved(mamba_radix_cache_strategy="extra_buffer_lazy"),
            "--mamba-radix-cache-strategy extra_buffer_lazy",
        ),
        (resolved(linear_attn_prefill_backend="cutedsl"), "--linear-attn-prefill-backend cutedsl"),
        (resolved(intervals="192", page_size=128), "--histate-intervals does not fit --page-size 128"),
        (resolved(tail=4160), "--histate-step-tail 4160 is more than half of --chunked-prefill-size 8192"),
        (resolved(tail=64, chunked_prefill_size=-1), "--histate-step-tail 64"),
        (resolved(tail=64, chunked_prefill_size=None), "--histate-step-tail 64"),
    ],
)
def test_resolved(case, flag) -> None:
    with pytest.raises(Refusal) as caught:
        check_all(*case)
    assert flag in str(caught.value) and "\n" not in str(caught.value)


def test_full_prefill_graphs() -> None:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    with pytest.raises(Refusal) as caught:
        check_all(*resolved(cuda_graph_config=graphs))
    one_sentence(caught, "--cuda-graph-backend-prefill full")


def test_default_intervals_that_do_not_fit_the_page_are_left_out_silently() -> None:
    check_all(*resolved(page_size=512))


def test_a_child_process_reports_through_the_mailbox(monkeypatch) -> None:
    monkeypatch.setenv("HISTATE_REFUSAL_FILE", "")
    mailbox = open_mailbox()
    assert read_message(mailbox) == "" and not mailbox.exists()
    mailbox = open_mailbox()
    leave_message("--histate-ssd-dir: no")
    assert read_message(mailbox) == "--histate-ssd-dir: no" and not mailbox.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_that_are_not_float32_are_stored_as_they_are(dtype) -> None:
    check_encoding(CheckpointDtype.NATIVE, dtype)
    for encoding in (CheckpointDtype.BF16, CheckpointDtype.INT8):
        check_encoding(encoding, torch.float32)
        with pytest.raises(Refusal) as caught:
            check_encoding(encoding, dtype)
        one_sentence(caught, f"--histate-checkpoint-dtype {encoding.value}")
        assert str(dtype).removeprefix("torch.") in str(caught.value)
