"""Prompts that the embedding could not look up are refused, all others pass."""

from __future__ import annotations

import pytest

from sglang_histate.cpu.token_ids import check_token_ids


@pytest.mark.parametrize("ids", [None, [], [0], [319], [0, 5, 319]])
def test_ids_in_the_vocabulary_pass(ids) -> None:
    check_token_ids(ids, 320)


@pytest.mark.parametrize("wrong", [-1, 320, 100_000_000])
def test_an_id_outside_is_named(wrong) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong}; valid range is \\[0, 320\\)"):
        check_token_ids([5, wrong, 7], 320)
