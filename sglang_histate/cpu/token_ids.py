"""Token ids that the CPU embedding can look up."""

from __future__ import annotations

from collections.abc import Sequence


def check_token_ids(input_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Check a prompt's token ids, each of which must be in ``[0, vocab_size)``.

    Raises:
        ValueError: names the first id that is not; SGLang answers 400 with it.
    """
    if not input_ids:
        return
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids contains the token id {wrong}; valid range is [0, {vocab_size})")
