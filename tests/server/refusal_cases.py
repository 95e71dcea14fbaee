"""Command lines and models that are refused once SGLang's arguments are parsed, and what the sentence has to name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WOULD_SERVE = 77  # exit code of refusal_driver.py for a server that would have started


@dataclass(frozen=True)
class Case:
    """`config` replaces the demo model by one with these entries in its config.json; None takes one out. No weights."""

    name: str
    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    config: dict[str, Any] | None = None
    serves: bool = False  # the counterpart: this one has to start


def _flag(flag: str, value: str | None = None, *more: str) -> Case:
    arguments = (flag,) if value is None else (flag, value)
    return Case(" ".join(arguments), (flag,), (*arguments, *more))


def _model(name: str, architecture: str, model_type: str, **entries: Any) -> Case:
    config = {"architectures": [architecture], "model_type": model_type, **entries}
    return Case(name, ("--model-path", architecture), config=config)


CASES = (
    _flag("--page-size", "32"),
    _flag("--page-size", "1"),
    _flag("--page-size", "96"),
    _flag("--chunked-prefill-size", "100"),
    _flag("--chunked-prefill-size", "32"),
    _flag("--histate-step-tail", "2048", "--chunked-prefill-size", "2048"),
    _flag("--histate-step-tail", "64", "--chunked-prefill-size", "-1"),
    Case("step-tail", (), ("--histate-step-tail", "2048", "--chunked-prefill-size", "4096"), serves=True),
    _flag("--disable-radix-cache"),
    Case("two-device-pools", ("--histate-static-split", "--enable-unified-memory"), ("--histate-static-split", "--enable-unified-memory")),
    Case("attention-without-one-pool", ("--attention-backend intel_amx", "--histate-static-split"), ("--attention-backend", "intel_amx")),
    Case("linear-attention-without-one-pool", ("DECODE", "--histate-static-split"), ("--linear-attn-decode-backend", "cutedsl")),
    Case("states-that-are-not-float32", ("--histate-checkpoint-dtype", "--mamba-ssm-dtype"), ("--histate-checkpoint-dtype", "bf16", "--mamba-ssm-dtype", "bfloat16")),
    Case("bf16-checkpoints", (), ("--histate-checkpoint-dtype", "bf16"), serves=True),
    Case("one-pool", (), ("--enable-unified-memory",), serves=True),
    Case("static-split", (), ("--histate-static-split",), serves=True),
    _flag("--enable-lmcache"),
    _flag("--enable-int8-mamba-checkpoint"),
    _flag("--enable-linear-replayssm"),
    _flag("--speculative-algorithm", "NGRAM"),
    _flag("--hicache-storage-backend", "file"),
    _flag("--hicache-write-policy", "write_back"),
    _flag("--radix-cache-backend", "unified"),
    _flag("--disaggregation-mode", "prefill"),
    _flag("--pp-size", "2"),
    _flag("--mamba-radix-cache-strategy", "no_buffer"),
    _flag("--linear-attn-backend", "cutedsl"),
    Case(
        "interval-off-the-page-grid",
        ("--histate-interval", "--page-size 128"),
        ("--page-size", "128", "--histate-intervals", "64,128"),
    ),
    Case(
        "fixed-interval-off-the-page-grid",
        ("--histate-interval", "--page-size 128"),
        ("--page-size", "128", "--histate-interval", "fixed:64"),
    ),
    Case(
        "rust-tree-core",
        ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",),
        environ=(("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust"),),
    ),
    Case("page-size-128-with-defaults-serves", (), ("--page-size", "128"), serves=True),
    Case("no-such-model", ("--model-path",), ("--model-path", "/nonexistent/model")),
    _model("pure-attention", "Qwen3ForCausalLM", "qwen3"),
    _model("pure-attention-llama", "LlamaForCausalLM", "llama"),
    _model(
        "mamba2", "NemotronHForCausalLM", "nemotron_h",
        layers_block_type=["mamba", "attention"] * 4, layer_types=None, mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
        ssm_state_size=16, conv_kernel=4, chunk_size=64,
    ),
    _model(
        "kda", "KimiLinearForCausalLM", "kimi_linear",
        linear_attn_config={
            "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "num_heads": 2, "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ),
    _model("lightning", "BailingMoeV2_5ForCausalLM", "bailing_hybrid", layer_group_size=4, group_norm_size=1),
)  # fmt: skip
