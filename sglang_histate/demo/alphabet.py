"""What each token id means, and how likely the demo model should find it regardless of context.

Ids 0 to 255 are the bytes themselves. Then come the special tokens, then reserved ones that fill the
vocabulary to `VOCAB_SIZE`, so that every id the model or a load generator can produce has a text.
"""

from __future__ import annotations

import math

NUM_BYTES = 256
VOCAB_SIZE = 320  # a multiple of 64, the unit to which SGLang pads vocabularies

#: Never shown in decoded text (``skip_special_tokens``).
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: One id each, but part of the text, because parsers of reasoning and tool calls read them there.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_NUM_NAMED = NUM_BYTES + len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
RESERVED_TOKENS = tuple(f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - _NUM_NAMED))

#: Token text -> id, for every token that is not a byte.
ADDED_TOKEN_IDS = {
    text: NUM_BYTES + i for i, text in enumerate(CONTROL_TOKENS + MARKUP_TOKENS + RESERVED_TOKENS)
}
END_OF_TEXT_ID = ADDED_TOKEN_IDS["<|endoftext|>"]
END_OF_TURN_ID = ADDED_TOKEN_IDS["<|im_end|>"]

VOWELS = frozenset(b"aeiouAEIOU")
CONSONANTS = frozenset(b"bcdfghjklmnpqrstvwxyzBCDFGHJKLMNPQRSTVWXYZ")
BREAKS = frozenset(b" \n.,;:!?-()'\"")

_UNWANTED = -16.0  # logits below the letters: out of reach of the context at any usual temperature
_END_OF_TURN = -6.5  # about one turn end in a thousand tokens or more
_PER_LETTER = {  # percent of English text
    "e": 12.7, "t": 9.1, "a": 8.2, "o": 7.5, "i": 7.0, "n": 6.7, "s": 6.3, "h": 6.1, "r": 6.0, "d": 4.3,
    "l": 4.0, "c": 2.8, "u": 2.8, "m": 2.4, "w": 2.4, "f": 2.2, "g": 2.0, "y": 2.0, "p": 1.9, "b": 1.5,
    "v": 1.0, "k": 0.8, "j": 0.15, "x": 0.15, "q": 0.1, "z": 0.07,
}  # fmt: skip
_PER_BREAK = {" ": 14.0, "\n": 1.2, ",": 1.5, ".": 1.5, "-": 0.15, "?": 0.1, "!": 0.1, "'": 0.1}
_PER_DIGIT = 0.08
_CAPITAL = 0.02  # of the small letter's share


def preferences() -> list[float]:
    """Return one logit offset per token id; 0 stands for a token that makes up 10 % of the text."""
    share = {**_PER_LETTER, **_PER_BREAK, **{str(digit): _PER_DIGIT for digit in range(10)}}
    share |= {letter.upper(): percent * _CAPITAL for letter, percent in _PER_LETTER.items()}
    offsets = [_UNWANTED] * VOCAB_SIZE
    for text, percent in share.items():
        offsets[ord(text)] = math.log(percent / 10.0)
    offsets[END_OF_TURN_ID] = _END_OF_TURN
    return offsets
