"""Any text round-trips, special tokens are one id each, every id has a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.demo.alphabet import ADDED_TOKEN_IDS, VOCAB_SIZE
from sglang_histate.demo.tokenizer import build_tokenizer

PLAIN = build_tokenizer()


@given(st.text())
def test_any_text_round_trips_as_its_bytes(text):
    tokens = PLAIN.encode(text).ids
    assert PLAIN.decode(tokens, skip_special_tokens=False) == text
    if "<" not in text:
        assert tokens == list(text.encode())


@pytest.mark.parametrize("text", ["", " ", "\n\n  a\tb\r\n", "naïve — 漢字 🦊", "\x00\x7f", "It's 42% <b>"])
def test_transformers_loads_it(tokenizer, text):
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("text", "token"), ADDED_TOKEN_IDS.items())
def test_added_tokens_are_one_id(tokenizer, text, token):
    assert tokenizer.encode(f"a{text} b") == [97, token, 32, 98]
    assert tokenizer.decode([token]) == text


def test_markup_stays_when_special_tokens_are_skipped(tokenizer):
    tokens = tokenizer.encode("<think>x</think><tool_call>y</tool_call><|im_end|>")
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "<think>x</think><tool_call>y</tool_call>"


def test_vocabulary_is_full(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    assert VOCAB_SIZE % 64 == 0
    assert all(tokenizer.convert_ids_to_tokens(token) is not None for token in range(VOCAB_SIZE))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
