"""The demo model's weights: random, but scaled so that every token depends on the whole history.

Tiny networks with the usual random weights barely read their recurrent state. Here

- the token mixers, not the token's own embedding, make up most of the final hidden state;
- each gated delta rule head forgets at its own pace, from tens of tokens to tens of thousands, and writes
  rarely but firmly, because with 32 key dimensions every write erases part of what was there;
- attention scores are sharp enough to pick out single tokens;
- logits are spread widely, so that rounding does not change the greedy choice.

The first channels of the hidden state are not random. Embeddings set them and no layer writes to them:
a constant, from which the output head and the write gates take their bias, and two hints about the current
token (vowel or consonant; letter or break) that make the text pronounceable.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_histate.demo import config
from sglang_histate.demo.alphabet import BREAKS, CONSONANTS, VOCAB_SIZE, VOWELS, preferences
from sglang_histate.demo.noise import noise

_CONSTANT, _VOWEL, _LETTER = 0, 1, 2
_NUM_DESIGNED = 3
_CONSTANT_VALUE = 3.0
_VOWEL_VALUE = 2.0
_LETTER_VALUE = 2.0

# Variance per random channel that the embedding, and then each sublayer, adds to the hidden state.
_EMBEDDING_VARIANCE = 1.0
_MIXER_VARIANCE = 1.0
_MLP_VARIANCE = 0.3

# Per value head: tokens until the gate alone has let the state fade to 1/e, and the rate constant A.
_MEMORY_TOKENS = (32768.0, 4096.0, 512.0, 64.0)
_RATE = (1.0, 0.5, 2.0, 1.0)
_MEMORY_SPREAD = 0.7  # standard deviation of the log of that time, token to token
# Write strength beta = sigmoid(normal of this mean and deviation).
_WRITE_MEAN = (-5.0, -4.0, -3.0, -1.0)
_WRITE_SPREAD = 2.0

_KEY_DEVIATION = 0.3  # small, so that SiLU is nearly linear and keys are not all alike
_VALUE_DEVIATION = 1.5
_ATTENTION_SHARPNESS = 1.4  # q and k norms; scores have the square of it as standard deviation

_LOGIT_DEVIATION = 2.6
_PREFERENCE_SCALE = 0.8
_SPELLING_SCALE = 2.0  # logits by which a vowel asks for a consonant and the reverse
_BREAK_SCALE = 1.2  # the same for breaks and letters
_REPEAT_PENALTY = 0.25  # how much a token's output row points away from its own embedding

# Root mean square of what the nonlinearities leave of a normal input.
_GATED_NORM_RMS = 0.6  # normalised head output * silu(z)
_GATED_ATTENTION_RMS = 0.3  # average of a few values * sigmoid(gate)
_GATED_MLP_RMS = 0.6  # silu(gate) * up


def write_weights(path: Path) -> None:
    """Write all tensors to the safetensors file `path`, float32, in the names of transformers."""
    tensors = {name: tensor.contiguous() for name, tensor in build_weights().items()}
    save_file(tensors, path, metadata={"format": "pt"})


def build_weights() -> dict[str, torch.Tensor]:
    """Return every parameter of the model by name."""
    embedding = _embedding()
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.zeros(config.HIDDEN_SIZE),
        "lm_head.weight": _output_head(embedding),
    }
    for layer, layer_type in enumerate(config.LAYER_TYPES):
        prefix = f"model.layers.{layer}."
        mixer = _linear_attention if layer_type == "linear_attention" else _full_attention
        weights |= mixer(prefix, layer) | _mlp(prefix)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.zeros(config.HIDDEN_SIZE)
    return weights


def _embedding() -> torch.Tensor:
    embedding = noise("embed_tokens", (VOCAB_SIZE, config.HIDDEN_SIZE), math.sqrt(_EMBEDDING_VARIANCE))
    embedding[:, _CONSTANT] = _CONSTANT_VALUE
    embedding[:, _VOWEL] = _VOWEL_VALUE * _vowel_sign()
    embedding[:, _LETTER] = _LETTER_VALUE * _letter_sign()
    return embedding


def _output_head(embedding: torch.Tensor) -> torch.Tensor:
    rms = _hidden_rms(config.NUM_LAYERS)
    random_channels = config.HIDDEN_SIZE - _NUM_DESIGNED
    head = noise("lm_head", (VOCAB_SIZE, config.HIDDEN_SIZE), _LOGIT_DEVIATION / math.sqrt(random_channels))
    head -= _REPEAT_PENALTY * embedding
    # Dividing by a channel's normalised value makes the numbers above logits.
    head[:, _CONSTANT] = torch.tensor(preferences()) * (_PREFERENCE_SCALE * rms / _CONSTANT_VALUE)
    head[:, _VOWEL] = -_vowel_sign() * (_SPELLING_SCALE * rms / _VOWEL_VALUE)
    head[:, _LETTER] = -_letter_sign() * (_BREAK_SCALE * rms / _LETTER_VALUE)
    return head


def _vowel_sign() -> torch.Tensor:
    """Return [vocabulary]: 1 for vowels, -1 for consonants, 0 for the rest."""
    return torch.tensor([float((t in VOWELS) - (t in CONSONANTS)) for t in range(VOCAB_SIZE)])


def _letter_sign() -> torch.Tensor:
    """Return [vocabulary]: 1 for letters, -1 for spaces and punctuation, 0 for the rest."""
    letters = VOWELS | CONSONANTS
    return torch.tensor([float((t in letters) - (t in BREAKS)) for t in range(VOCAB_SIZE)])


def _linear_attention(prefix: str, layer: int) -> dict[str, torch.Tensor]:
    prefix += "linear_attn."
    qkv = torch.cat(
        [
            _read(prefix + "in_proj_q", config.KEY_DIM, _KEY_DEVIATION),
            _read(prefix + "in_proj_k", config.KEY_DIM, _KEY_DEVIATION),
            _read(prefix + "in_proj_v", config.VALUE_DIM, _VALUE_DEVIATION),
        ]
    )
    write_gate = _read(prefix + "in_proj_b", config.NUM_VALUE_HEADS, _WRITE_SPREAD)
    write_gate[:, _CONSTANT] = torch.tensor(_WRITE_MEAN) * (_hidden_rms(layer) / _CONSTANT_VALUE)
    # The gate fades the state by exp(-A * softplus(a + dt_bias)) per token, and softplus(x) is about exp(x)
    # where the result is small.
    time_step = [-math.log(memory * rate) for memory, rate in zip(_MEMORY_TOKENS, _RATE, strict=True)]
    taps = config.CONV_KERNEL_SIZE
    out_deviation = math.sqrt(_MIXER_VARIANCE / config.VALUE_DIM) / _GATED_NORM_RMS
    return {
        prefix + "in_proj_qkv.weight": qkv,
        prefix + "in_proj_z.weight": _read(prefix + "in_proj_z", config.VALUE_DIM, 1.0),
        prefix + "in_proj_b.weight": write_gate,
        prefix + "in_proj_a.weight": _read(prefix + "in_proj_a", config.NUM_VALUE_HEADS, _MEMORY_SPREAD),
        prefix + "conv1d.weight": noise(prefix + "conv1d", (config.CONV_DIM, 1, taps), 1 / math.sqrt(taps)),
        prefix + "A_log": torch.tensor([math.log(rate) for rate in _RATE]),
        prefix + "dt_bias": torch.tensor(time_step),
        prefix + "norm.weight": torch.ones(config.VALUE_HEAD_DIM),
        prefix + "out_proj.weight": _write(prefix + "out_proj", config.VALUE_DIM, out_deviation),
    }


def _full_attention(prefix: str, layer: int) -> dict[str, torch.Tensor]:
    prefix += "self_attn."
    query_dim = config.NUM_ATTENTION_HEADS * config.HEAD_DIM
    kv_dim = config.NUM_KV_HEADS * config.HEAD_DIM
    # These norms multiply by 1 + weight.
    sharpness = torch.full((config.HEAD_DIM,), _ATTENTION_SHARPNESS - 1.0)
    out_deviation = math.sqrt(_MIXER_VARIANCE / query_dim) / _GATED_ATTENTION_RMS
    return {
        prefix + "q_proj.weight": _read(prefix + "q_proj", 2 * query_dim, 1.0),  # query and output gate
        prefix + "k_proj.weight": _read(prefix + "k_proj", kv_dim, 1.0),
        prefix + "v_proj.weight": _read(prefix + "v_proj", kv_dim, 1.0),
        prefix + "q_norm.weight": sharpness,
        prefix + "k_norm.weight": sharpness.clone(),
        prefix + "o_proj.weight": _write(prefix + "o_proj", query_dim, out_deviation),
    }


def _mlp(prefix: str) -> dict[str, torch.Tensor]:
    prefix += "mlp."
    out_deviation = math.sqrt(_MLP_VARIANCE / config.INTERMEDIATE_SIZE) / _GATED_MLP_RMS
    return {
        prefix + "gate_proj.weight": _read(prefix + "gate_proj", config.INTERMEDIATE_SIZE, 1.0),
        prefix + "up_proj.weight": _read(prefix + "up_proj", config.INTERMEDIATE_SIZE, 1.0),
        prefix + "down_proj.weight": _write(prefix + "down_proj", config.INTERMEDIATE_SIZE, out_deviation),
    }


def _read(name: str, rows: int, deviation: float) -> torch.Tensor:
    """Return [rows, hidden]: reads a normalised hidden state's random channels, output of `deviation`."""
    random_channels = config.HIDDEN_SIZE - _NUM_DESIGNED
    weight = noise(name, (rows, config.HIDDEN_SIZE), deviation / math.sqrt(random_channels))
    weight[:, :_NUM_DESIGNED] = 0.0
    return weight


def _write(name: str, columns: int, deviation: float) -> torch.Tensor:
    """Return [hidden, columns]: writes to the random channels only."""
    weight = noise(name, (config.HIDDEN_SIZE, columns), deviation)
    weight[:_NUM_DESIGNED] = 0.0
    return weight


def _hidden_rms(layer: int) -> float:
    """Return the expected root mean square of the hidden state before `layer`, over all its channels."""
    designed = _CONSTANT_VALUE**2 + _VOWEL_VALUE**2 + _LETTER_VALUE**2
    per_channel = _EMBEDDING_VARIANCE + layer * (_MIXER_VARIANCE + _MLP_VARIANCE)
    random_channels = config.HIDDEN_SIZE - _NUM_DESIGNED
    return math.sqrt((designed + random_channels * per_channel) / config.HIDDEN_SIZE)
