"""Sizes of KV and checkpoints from a hybrid model's `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.workloads.fields import TraceError

_KV_BYTES = 2  # bf16
_STATE_BYTES = 4  # `mamba_ssm_dtype` is float32 in models of this kind
_CONV_BYTES = 2
_NEEDED = (
    *(
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


def sizes_of(folder: Path) -> dict[str, int]:
    """Return `kv_token_bytes` and `state_bytes` of a model with gated-delta-rule layers, {} for any other.

    KV and the convolution window as bf16, the state as float32; fields as Qwen3-Next and Qwen3.5 have them, in the
    file itself or in its `text_config`. Sizes only: how long the model computes, the file does not say.

    Raises:
        TraceError: the file is no JSON.
        OSError: it cannot be read.
    """
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{file}: no JSON: {error}") from None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict) and all(isinstance(part.get(name), int) for name in _NEEDED):
            return _sizes(part)
    return {}


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    kinds = config.get("layer_types")
    layers = int(config["num_hidden_layers"])
    full = (
        kinds.count("full_attention")
        if isinstance(kinds, list)
        else layers // int(config.get("full_attention_interval", 4))
    )
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    state = values * config["linear_key_head_dim"] * _STATE_BYTES
    window = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1) * _CONV_BYTES
    return {
        "kv_token_bytes": full * 2 * config["num_key_value_heads"] * config["head_dim"] * _KV_BYTES,
        "state_bytes": (layers - full) * (state + window),
    }
