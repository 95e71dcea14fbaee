"""Which models HiState serves, by the name of their architecture. Imports nothing, so that tools need no sglang for it."""

from __future__ import annotations

# Gated delta rule models: their kernels hand out the states inside a prompt.
SUPPORTED_ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
