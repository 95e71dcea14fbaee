"""The demo model's architecture: `config.json` and `generation_config.json` as dictionaries.

Text-only Qwen3.5, known to SGLang 0.5.23 and to transformers as ``Qwen3_5ForCausalLM``. Two tensor-parallel
ranks divide every head count and the vocabulary. Heads are few and narrow because SGLang's CPU attention
(torch_native) is quadratic in the context.
"""

from __future__ import annotations

from typing import Any

from sglang_histate.demo.alphabet import END_OF_TEXT_ID, END_OF_TURN_ID, VOCAB_SIZE

HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
NUM_LAYERS = 8
FULL_ATTENTION_INTERVAL = 4  # layers 3 and 7 are full attention, the others gated delta rule
RMS_NORM_EPS = 1e-6

NUM_ATTENTION_HEADS = 2
NUM_KV_HEADS = 2
HEAD_DIM = 16

# Key and value dimensions differ on purpose: code that swaps the state's last two axes cannot pass.
NUM_KEY_HEADS = 2
NUM_VALUE_HEADS = 4
KEY_HEAD_DIM = 32
VALUE_HEAD_DIM = 16
CONV_KERNEL_SIZE = 4

KEY_DIM = NUM_KEY_HEADS * KEY_HEAD_DIM
VALUE_DIM = NUM_VALUE_HEADS * VALUE_HEAD_DIM
CONV_DIM = 2 * KEY_DIM + VALUE_DIM

LAYER_TYPES = tuple(
    "full_attention" if (layer + 1) % FULL_ATTENTION_INTERVAL == 0 else "linear_attention"
    for layer in range(NUM_LAYERS)
)


def model_config() -> dict[str, Any]:
    """Return `config.json`. transformers reads the layer types, SGLang the interval: both are given."""
    partial_rotary_factor = 0.25
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "mamba_ssm_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_NORM_EPS,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "layer_types": list(LAYER_TYPES),
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "num_attention_heads": NUM_ATTENTION_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attn_output_gate": True,
        "partial_rotary_factor": partial_rotary_factor,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": partial_rotary_factor,
        },
        "linear_num_key_heads": NUM_KEY_HEADS,
        "linear_num_value_heads": NUM_VALUE_HEADS,
        "linear_key_head_dim": KEY_HEAD_DIM,
        "linear_value_head_dim": VALUE_HEAD_DIM,
        "linear_conv_kernel_dim": CONV_KERNEL_SIZE,
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def generation_config() -> dict[str, Any]:
    """Return `generation_config.json`: sampling at temperature 1 unless a request says otherwise."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": [END_OF_TURN_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }
