"""A hybrid model's shape, from its `config.json`: layers, heads, dimensions, and how many weights these make.

Fields as Qwen3-Next and Qwen3.5 have them, in the file itself or in its `text_config`. Nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sglang_histate.adapter.supported import SUPPORTED_ARCHITECTURES
from sglang_histate.cli.size.errors import SizeError

_NUMBERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True)
class ModelShape:
    """Of the whole model, before ranks divide it. `mlp_weights`, `mlp_active`: of all layers, and those one token uses."""

    architecture: str
    linear_layers: tuple[int, ...]
    full_layers: int
    hidden: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int
    vocabulary: int
    tied: bool
    mlp_weights: int
    mlp_active: int
    dtype: str
    state_dtype: str

    @property
    def layers(self) -> int:
        return len(self.linear_layers) + self.full_layers

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of a linear layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def mixer_weights(self) -> int:
        """Weights of all attention and linear-attention layers in matrix products."""
        queries, keys = self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        # The output gate of full attention is as wide as the queries and comes from the same product.
        full = self.hidden * (2 * queries + 2 * keys) + queries * self.hidden
        values = self.value_heads * self.value_dim
        linear = self.hidden * (self.channels + values + 2 * self.value_heads) + values * self.hidden
        return self.full_layers * full + len(self.linear_layers) * linear

    @property
    def all_weights(self) -> int:
        """Weights of the language model; norms, biases and a vision tower are not counted."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.mixer_weights + self.mlp_weights + embeddings

    @property
    def token_flop(self) -> int:
        """Floating-point operations per prompt token, but for attention to the tokens before it."""
        state = len(self.linear_layers) * self.value_heads * self.value_dim * self.key_dim
        # Decay, read, update and write of a state, about ten operations for each of its numbers.
        return 2 * (self.mixer_weights + self.mlp_active) + 10 * state

    @property
    def pair_flop(self) -> int:
        """Floating-point operations per pair of a token and one before it: scores and values."""
        return 4 * self.attention_heads * self.head_dim * self.full_layers


def read_model(path: Path) -> ModelShape:
    """Read a `config.json`, or the one in a folder.

    Raises:
        SizeError: no such file, no JSON, a model that HiState does not serve, or fields that are missing.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SizeError(
            f"--model {path}: {file} cannot be read ({error.strerror}): name a folder with a config.json, or that file"
            + (
                f"; hf download {path} config.json fetches it and prints where it is"
                if _is_name(path)
                else ""
            )
        ) from None
    except ValueError:
        raise SizeError(f"--model {path}: {file} is no JSON: name a model's config.json") from None
    if not isinstance(config, dict):
        raise SizeError(f"--model {path}: {file} is no JSON object: name a model's config.json")
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "model of unknown architecture"
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise SizeError(
            f"--model {path} is a {architecture}: HiState serves {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    return _shape(path, architecture, {**config, **text})


def _is_name(path: Path) -> bool:
    """Whether `path` may be meant as a model's name on the hub, as the server's --model-path may."""
    return not path.is_absolute() and len(path.parts) == 2 and not path.parts[0].startswith(".")


def _shape(path: Path, architecture: str, config: dict[str, Any]) -> ModelShape:
    missing = [name for name in _NUMBERS if not _is_count(config.get(name))]
    if missing:
        raise SizeError(f"--model {path}: its config.json has no {missing[0]}: is it complete?")
    for name, right in _OPTIONAL.items():
        if config.get(name) is not None and not right(config[name]):
            raise SizeError(f"--model {path}: its config.json has {name} {config[name]!r}: is it damaged?")
    layers = int(config["num_hidden_layers"])
    linear = _linear_layers(path, config, layers)
    every, active = _mlp(path, config, layers)
    return ModelShape(
        architecture=architecture,
        linear_layers=linear,
        full_layers=layers - len(linear),
        hidden=config["hidden_size"],
        attention_heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or max(1, config["hidden_size"] // config["num_attention_heads"]),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        window=config["linear_conv_kernel_dim"] - 1,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        mlp_weights=every,
        mlp_active=active,
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        state_dtype=config.get("mamba_ssm_dtype") or "float32",
    )


def _linear_layers(path: Path, config: dict[str, Any], layers: int) -> tuple[int, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval") or 4
        kinds = ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(layers)]
    linear = tuple(at for at, kind in enumerate(kinds) if kind == "linear_attention")
    if len(kinds) != layers or not 0 < len(linear) < layers:
        raise SizeError(
            f"--model {path}: {len(linear)} of its {layers} layers are linear attention and {len(kinds)} have a type: "
            "HiState is for models with both kinds of layer"
        )
    return linear


def _mlp(path: Path, config: dict[str, Any], layers: int) -> tuple[int, int]:
    """Return the weights of all layers' MLPs or experts, and how many of them one token uses."""
    hidden, experts = config["hidden_size"], config.get("num_experts") or 0
    if experts:
        width, shared = (
            config.get("moe_intermediate_size"),
            config.get("shared_expert_intermediate_size") or 0,
        )
        used = config.get("num_experts_per_tok")
        if not (_is_count(width) and _is_count(used)):
            raise SizeError(
                f"--model {path}: its config.json has {experts} experts, but not their moe_intermediate_size and "
                "num_experts_per_tok: is it complete?"
            )
        dense = len(config.get("mlp_only_layers") or ())
        common = hidden * experts + 3 * hidden * shared + (hidden if shared else 0)
        plain = dense * 3 * hidden * (config.get("intermediate_size") or 0)
        every = plain + (layers - dense) * (common + experts * 3 * hidden * width)
        return every, plain + (layers - dense) * (common + used * 3 * hidden * width)
    if not _is_count(config.get("intermediate_size")):
        raise SizeError(f"--model {path}: its config.json has no intermediate_size: is it complete?")
    weights = layers * 3 * hidden * config["intermediate_size"]
    return weights, weights


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_count_or_none_of_it(value: Any) -> bool:
    return _is_count(value) or value == 0


# Where they are given, they are this; see `DTYPE_BYTES` for the states' dtypes that a server takes.
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "head_dim": _is_count,
    "full_attention_interval": _is_count,
    "layer_types": lambda value: isinstance(value, list),
    "num_experts": _is_count_or_none_of_it,
    "shared_expert_intermediate_size": _is_count_or_none_of_it,
    "intermediate_size": _is_count_or_none_of_it,
    "mlp_only_layers": lambda value: isinstance(value, list),
    "dtype": lambda value: isinstance(value, str),
    "torch_dtype": lambda value: isinstance(value, str),
    "mamba_ssm_dtype": lambda value: value in ("float32", "bfloat16", "float16"),
}
