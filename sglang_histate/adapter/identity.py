"""What must be equal before a stored checkpoint may be used: model, weights, shapes, encoding, ranks, page size.

Everything here is plain values in a fixed order: two servers with equal settings have equal identities, in any process
and on any machine. What is not here may change between two servers that share a store: budgets, policies, batch sizes,
ports, and kernels that compute the same numbers up to rounding from the same layout.
"""

from __future__ import annotations

from typing import Any

import sglang
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.adapter.weights_identity import adapters_identity, canonical_json, weights_identity

# Flags that change which weights are in memory, or what they are computed as, without another file on disk.
_LOADING_FLAGS = (
    "load_format",
    "model_impl",
    "modelopt_quant",
    "quantization_param_path",
    "rl_quant_profile",
    "weight_version",
)


def store_identity(ctx: TreeCacheBuildContext, layout: StateLayout, page_size: int) -> dict[str, Any]:
    """Return the identity as JSON values. Another identity is another directory, never a migration."""
    model, args, parallel = ctx.model_config, ctx.server_args, get_parallel()
    return {
        "weights": weights_identity(model.model_path, getattr(model, "revision", None)),
        "loading": _loading(args),
        "adapters": adapters_identity(get_lora().lora_paths),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "overrides": canonical_json(args.json_model_override_args),
        "kv": _kv(ctx.params.token_to_kv_pool_allocator.get_kvcache()),
        "state": layout.identity(),
        "linear_attention": _linear_attention(),
        "page_size": page_size,
        "tp": [ctx.tp_rank, ctx.tp_size],
        "pp": [parallel.pp_rank, parallel.pp_size],
        "attn_tp": [parallel.attn_tp_rank, parallel.attn_tp_size],
        "attn_cp": [parallel.attn_cp_rank, parallel.attn_cp_size],
        "attn_dcp": parallel.attn_dcp_size,
        "hash_scheme": "sglang-sha256-page-chain",
        "sglang": sglang.__version__,
    }


def _loading(args: Any) -> dict[str, Any]:
    flags: dict[str, Any] = {name: _plain(getattr(args, name, None)) for name in _LOADING_FLAGS}
    flags["extra_config"] = canonical_json(args.model_loader_extra_config)
    if flags["load_format"] == "dummy":
        flags["random_seed"] = args.random_seed  # the weights are made of it
    return flags


def _kv(kv_cache: Any) -> dict[str, Any]:
    """How KV lies in a page: the pages go to the same store. Their bytes are part of the store's own layout."""
    (declaration, *_) = kv_cache.host_pool_decls()
    info = declaration.device_pool.get_device_pool_infos()[0].buffer_info
    return {
        "dtype": str(kv_cache.dtype),  # float8_e4m3 and float8_e5m2 are both kept as uint8
        "stored_dtype": str(info.dtype),
        "heads": info.head_num,
        "head_dims": [info.head_dim, info.v_head_dim],
        "layers": len(info.buffers.k),
        "layout": info.buffers.layout.value,
    }


def _linear_attention() -> dict[str, Any]:
    """Kernels and modes that could keep a state in another element order or lag behind its position."""
    mamba = get_exec().mamba
    return {
        "backend": _plain(mamba.linear_attn_backend),
        "prefill_backend": _plain(mamba.linear_attn_prefill_backend),
        "decode_backend": _plain(mamba.linear_attn_decode_backend),
        "replayssm": bool(mamba.enable_linear_replayssm),
        "replayssm_spec": bool(mamba.enable_linear_replayssm_spec),
        "int8_pool": bool(mamba.enable_int8_mamba_checkpoint),
    }


def _plain(value: Any) -> Any:
    """Return a flag's value, which has to be one that JSON writes alike in every process: never an address."""
    assert value is None or isinstance(value, str | int | float | list | dict), f"{value!r} is no plain value"
    return value
