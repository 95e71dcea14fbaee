"""The demo model's tokenizer files: one token per byte, so that any text round-trips."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_histate.demo.alphabet import ADDED_TOKEN_IDS, MARKUP_TOKENS, NUM_BYTES
from sglang_histate.demo.config import model_config

_TEMPLATE_NAME = "chat_template.jinja"


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    (folder / "tokenizer.json").write_text(build_tokenizer().to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=2), encoding="utf-8")
    template = Path(__file__).with_name(_TEMPLATE_NAME).read_text(encoding="utf-8")
    (folder / _TEMPLATE_NAME).write_text(template, encoding="utf-8")


def build_tokenizer() -> Tokenizer:
    """Return a byte-level BPE without merges: byte b is token b, added tokens follow."""
    vocab = {text: byte for byte, text in _byte_texts().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Splitting into words changes no token, but short pieces keep BPE's per-word cost small.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # `normalized=False` matches the added token only where its exact text stands.
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in MARKUP_TOKENS, normalized=False) for text in ADDED_TOKEN_IDS]
    )
    return tokenizer


def _byte_texts() -> dict[int, str]:
    """Return byte -> the printable character that stands for it in byte-level vocabularies, as in GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_config()["max_position_embeddings"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
