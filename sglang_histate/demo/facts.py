"""The demo model's sizes in bytes, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_histate.demo import config

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SSM_BYTES = 4  # `mamba_ssm_dtype` is float32


@dataclass(frozen=True)
class DemoFacts:
    """Sizes over all layers and ranks; `n_s` is a checkpoint's size in tokens of KV."""

    linear_layers: int
    full_layers: int
    ssm_bytes: int
    conv_bytes: int
    checkpoint_bytes: int
    kv_bytes_per_token: int
    n_s: float


def demo_facts(conv_dtype: str = "float32", kv_dtype: str = "float32") -> DemoFacts:
    """Return the sizes for the conv window and the KV stored in the given dtypes.

    SGLang keeps the conv window in ``SGLANG_MAMBA_CONV_DTYPE``, which is bfloat16 unless set.

    Raises:
        KeyError: for a dtype other than float32, bfloat16 and float16.
    """
    linear_layers = config.LAYER_TYPES.count("linear_attention")
    full_layers = config.LAYER_TYPES.count("full_attention")
    state_elements = config.NUM_VALUE_HEADS * config.VALUE_HEAD_DIM * config.KEY_HEAD_DIM
    window_elements = config.CONV_DIM * (config.CONV_KERNEL_SIZE - 1)
    ssm_bytes = linear_layers * state_elements * _SSM_BYTES
    conv_bytes = linear_layers * window_elements * _BYTES[conv_dtype]
    kv_bytes_per_token = full_layers * 2 * config.NUM_KV_HEADS * config.HEAD_DIM * _BYTES[kv_dtype]
    return DemoFacts(
        linear_layers=linear_layers,
        full_layers=full_layers,
        ssm_bytes=ssm_bytes,
        conv_bytes=conv_bytes,
        checkpoint_bytes=ssm_bytes + conv_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        n_s=(ssm_bytes + conv_bytes) / kv_bytes_per_token,
    )
