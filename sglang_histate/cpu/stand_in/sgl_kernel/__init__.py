"""Stand-in for the compiled `sgl_kernel` package on a machine without CUDA.

The wheel of the real package needs libcuda, so on a CPU-only machine `import sgl_kernel` fails. The overlay
puts this package in front of it. It holds:

* the ops that Qwen3.5 and Qwen3-Next dense models reach on CPU, as plain functions of `sglang_histate.cpu`;
* the names that sglang modules import when they are loaded. Those raise NotImplementedError when called.

`torch.ops.sgl_kernel.convert_weight_packed` must stay undefined: its presence is how SGLang decides that the
AMX kernels exist (`cpu_has_amx_support`). The ops are attributes of the op namespace, not registered ops:
they need no dispatch, no autograd and no tracing.
"""

from __future__ import annotations

import torch

from sgl_kernel import kvcacheio, mamba, speculative
from sgl_kernel._absent import absent
from sglang_histate.cpu import gdn, qkv

__version__ = "0.0.0+histate.cpu"

for _op in (
    gdn.fused_gdn_gating_cpu,
    gdn.fused_sigmoid_gating_delta_rule_update_cpu,
    qkv.fused_qk_gemma_rmsnorm_cpu,
    qkv.fused_qk_gemma_rmsnorm_with_gate_cpu,
    qkv.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    qkv.fused_qkvzba_split_reshape_cat_cpu,
    qkv.fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _op.__name__, _op)

# Imported by speculative decoding, MoE, pool and attention modules at load time; no dense model calls them.
for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "gelu_and_mul",
    "merge_state_v2",
    "rotate_input_ids_cpu",
    "silu_and_mul",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = absent(_name)

__all__ = ["kvcacheio", "mamba", "speculative"]
