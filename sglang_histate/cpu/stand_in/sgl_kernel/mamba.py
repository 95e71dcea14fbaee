"""`sgl_kernel.mamba` for CPU: the convolution and the chunked gated delta rule."""

from sglang_histate.cpu.conv import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from sglang_histate.cpu.gdn import chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
