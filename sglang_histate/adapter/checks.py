"""What HiState refuses to serve with, each by one sentence that names the flag and the way out."""

from __future__ import annotations

import os
from typing import Any

import sglang
import torch

from sglang_histate.adapter.refusal import Refusal
from sglang_histate.adapter.supported import SUPPORTED_ARCHITECTURES
from sglang_histate.config import CheckpointDtype, HiStateConfig
from sglang_histate.policy.interval import STEP_TOKENS, check_grid
from sglang_histate.upstream import check_active_overlay

# What reads KV through the translation of one pool, and follows the strides of its rows.
_ONE_POOL_ATTENTION = ("triton", "fa3", "fa4", "flashinfer", "trtllm_mha")
_ONE_POOL_ATTENTION_CPU = ("torch_native",)
_SPLIT = "or keep a fixed share for KV and one for states by --histate-static-split"
_OFF = "or serve without HiState by --disable-histate"
_TREE_CORE_VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def check_arguments(args: Any) -> None:
    """Refuse what the command line alone shows. `args` is SGLang's record before resolution.

    Raises:
        Refusal: see the module docstring.
    """
    excluded = {
        "disable_radix_cache": "--disable-radix-cache switches off the cache that HiState extends",
        "enable_lmcache": "--enable-lmcache and HiState are two caches for the same pools",
        "enable_flexkv": "--enable-flexkv and HiState are two caches for the same pools",
        "enable_unified_cache_external_linker": (
            "--enable-unified-cache-external-linker and HiState are two caches for the same pools"
        ),
        "enable_int8_mamba_checkpoint": "--enable-int8-mamba-checkpoint stores states that HiState cannot read",
        "enable_linear_replayssm": "--enable-linear-replayssm keeps states that lag behind their position",
        "enable_mis": "--enable-mis computes prompts without handing out states",
        "enable_pdmux": "--enable-pdmux splits the forward pass that captures states",
        "enable_two_batch_overlap": "--enable-two-batch-overlap splits the batch that captures states",
        "elastic_ep_backend": "--elastic-ep-backend repeats forward passes, and states can be captured only once",
        "enable_linear_replayssm_spec": "--enable-linear-replayssm-spec keeps states that lag behind their position",
    }
    for name, sentence in excluded.items():
        if getattr(args, name, False):
            raise Refusal(f"{sentence}: drop it, {_OFF}")
    if args.speculative_algorithm:
        raise Refusal(
            f"--speculative-algorithm {args.speculative_algorithm} is not supported by HiState yet: drop it, {_OFF}"
        )
    if args.hicache_storage_backend:
        raise Refusal(
            f"--hicache-storage-backend {args.hicache_storage_backend} cannot be combined with HiState, which is a "
            f"storage tier itself: drop it, {_OFF}"
        )
    if args.hicache_host_memory_mode != "cache":
        raise Refusal(
            f"--hicache-host-memory-mode {args.hicache_host_memory_mode} keeps no KV on the host, which HiState needs: "
            f"use cache, {_OFF}"
        )
    if args.hicache_write_policy == "write_back":
        raise Refusal(
            "--hicache-write-policy write_back drops states without a copy: use write_through, " + _OFF
        )
    if args.radix_cache_backend not in (None, "histate"):
        raise Refusal(
            f"--radix-cache-backend {args.radix_cache_backend} replaces the cache that HiState extends: drop it, {_OFF}"
        )
    if args.disaggregation_mode != "null":
        raise Refusal(
            f"--disaggregation-mode {args.disaggregation_mode} is not supported by HiState yet: drop it, {_OFF}"
        )
    if args.pp_size > 1:
        raise Refusal(f"--pp-size {args.pp_size} is not supported by HiState yet: use 1, {_OFF}")
    core = os.environ.get(_TREE_CORE_VARIABLE, "python")
    if core != "python":
        raise Refusal(
            f"{_TREE_CORE_VARIABLE}={core} forces a tree core that HiState cannot extend: unset it, {_OFF}"
        )
    _check_steps(args.page_size, args.chunked_prefill_size)
    _check_states(args)
    _check_device_pool(args)
    if args.mamba_ssm_dtype is not None:  # else the model's, which is known once it is built
        check_encoding(CheckpointDtype(args.histate_checkpoint_dtype), getattr(torch, args.mamba_ssm_dtype))


def check_model(model_config: Any, model_path: str) -> None:
    """Refuse a model whose layers do not hand out states inside a prompt.

    Raises:
        Refusal: see the module docstring.
    """
    architecture = (model_config.hf_config.architectures or ["unknown"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise Refusal(
            f"--model-path {model_path} is a {architecture}, HiState serves {', '.join(SUPPORTED_ARCHITECTURES)}: "
            f"choose another model, {_OFF}"
        )


def check_encoding(encoding: CheckpointDtype, state_dtype: torch.dtype) -> None:
    """Refuse to encode states that are small already: two roundings one on the other have no bound worth stating.

    Raises:
        Refusal: see the module docstring.
    """
    if encoding is not CheckpointDtype.NATIVE and state_dtype is not torch.float32:
        raise Refusal(
            f"--histate-checkpoint-dtype {encoding.value} encodes states in float32, this model keeps them in "
            f"{str(state_dtype).removeprefix('torch.')}: use native, or --mamba-ssm-dtype float32, {_OFF}"
        )


def check_resolved(view: Any, config: HiStateConfig) -> None:
    """Refuse what only SGLang's own resolution of the flags shows.

    Raises:
        Refusal: see the module docstring.
    """
    _check_steps(view.page_size, view.chunked_prefill_size)
    _check_tail(config.step_tail_tokens, view.chunked_prefill_size)
    _check_states(view)
    graphs = getattr(view, "cuda_graph_config", None)
    if graphs is not None and str(graphs.prefill.backend) == "full":
        raise Refusal(
            "--cuda-graph-backend-prefill full runs the layers without the calls that hand out states: use breakable or "
            f"disabled, {_OFF}"
        )
    try:
        if not config.intervals_are_default:
            check_grid(config.interval.supported, view.page_size)
    except ValueError as error:
        raise Refusal(f"--histate-intervals does not fit --page-size {view.page_size}: {error}") from None


def one_pool_sentence(sentence: str) -> str:
    """Return SGLang's own refusal with HiState's way out, if it is one pool for KV and states that it refuses."""
    if "unified" not in sentence and "page-major" not in sentence:
        return sentence
    return f"{sentence.rstrip('. ')}: change that, {_SPLIT}"


def _check_device_pool(args: Any) -> None:
    if args.histate_static_split and args.enable_unified_memory:
        raise Refusal(
            "--histate-static-split and --enable-unified-memory ask for opposite device pools: drop one of them, "
            + _OFF
        )
    if not args.enable_unified_memory:
        return
    known = _ONE_POOL_ATTENTION_CPU if args.device == "cpu" else _ONE_POOL_ATTENTION
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(args, name)
        if backend not in (None, *known):
            raise Refusal(
                f"--{name.replace('_', '-')} {backend} cannot read one device pool of KV and states: use "
                f"{' or '.join(known)}, {_SPLIT}, {_OFF}"
            )


def _check_states(view: Any) -> None:
    strategy = view.mamba_radix_cache_strategy
    if strategy not in ("auto", "extra_buffer"):
        raise Refusal(
            f"--mamba-radix-cache-strategy {strategy} is not one that HiState extends: use extra_buffer, {_OFF}"
        )
    for name in ("linear_attn_backend", "linear_attn_prefill_backend"):
        backend = getattr(view, name, None)
        if backend not in (None, "triton", "flashinfer"):
            raise Refusal(
                f"--{name.replace('_', '-')} {backend} hands out no states inside a prompt: use triton, {_OFF}"
            )


def _check_steps(page_size: int | None, chunk: int | None) -> None:
    if page_size is not None and (page_size < STEP_TOKENS or page_size % STEP_TOKENS):
        raise Refusal(
            f"--page-size {page_size} is not a multiple of {STEP_TOKENS}, where states exist inside a prompt: use "
            f"{STEP_TOKENS}, {_OFF}"
        )
    if chunk is not None and chunk > 0 and chunk % STEP_TOKENS:
        raise Refusal(
            f"--chunked-prefill-size {chunk} is not a multiple of {STEP_TOKENS}, where states exist inside a prompt: "
            f"use {max(1, chunk // STEP_TOKENS) * STEP_TOKENS}, {_OFF}"
        )


def _check_tail(tail: int, chunk: int | None) -> None:
    """The length of a step is known once SGLang has resolved its flags."""
    if not tail:
        return
    if chunk is None or chunk <= 0:
        raise Refusal(
            f"--histate-step-tail {tail} is a part of --chunked-prefill-size, which is off: give it a size, or use 0, {_OFF}"
        )
    if tail > chunk // 2:
        raise Refusal(
            f"--histate-step-tail {tail} is more than half of --chunked-prefill-size {chunk}: use "
            f"{chunk // 2 // STEP_TOKENS * STEP_TOKENS} at most, {_OFF}"
        )


def check_runtime(ctx: Any, cache: Any) -> None:
    """Inside a scheduler process: the overlay is active, the tree is the one we extend, the kernels are known.

    Raises:
        UpstreamError, Refusal: serving half on would be worse than not serving.
    """
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    on_cpu = not str(ctx.params.req_to_token_pool.device).startswith("cuda")
    check_active_overlay(("cpu", "histate") if on_cpu else ("histate",), str(sglang.__file__))
    if not isinstance(cache.tree_core, UnifiedTreeCore):
        raise Refusal(
            f"the tree core {type(cache.tree_core).__name__} is active, HiState extends the Python one: "
            f"unset {_TREE_CORE_VARIABLE}, {_OFF}"
        )
    if "histate_capture" not in ForwardBatch.__dataclass_fields__:
        raise Refusal("the capture patch is not active: start with python -m sglang_histate.launch_server")
    if cache.cache_controller is None:
        raise Refusal(
            "the host tier is off: drop the flag that switches off --enable-hierarchical-cache, " + _OFF
        )
    pool = ctx.params.req_to_token_pool.mamba_pool
    if len(pool.mamba_cache.conv) != 1:
        raise Refusal(
            f"the model keeps {len(pool.mamba_cache.conv)} convolution states per layer, HiState stores one"
        )
    (info,) = pool.get_device_pool_infos()
    if info.buffer_info.extra_checkpoint_buffers:
        raise Refusal(
            "the model keeps side states per slot that HiState does not store: " + _OFF.removeprefix("or ")
        )
