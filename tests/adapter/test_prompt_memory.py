"""The prompt that goes along furthest, against a comparison of all with all; bounds; tenants."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.prompt_memory import PromptMemory

PAGE = 4


def keys_of(tokens: list[int], tenant: str | None = None) -> tuple[bytes, list[bytes]]:
    keys = PageKeys(PAGE, tenant, None)
    end = len(tokens) // PAGE * PAGE
    return keys.namespace, keys.between(array("q", tokens), 0, end) if end else []


def add(memory: PromptMemory, rid: str, tokens: list[int], tenant: str | None = None) -> None:
    memory.add(rid, *keys_of(tokens, tenant), np.array(tokens, dtype=np.int64))


def match(memory: PromptMemory, tokens: list[int], tenant: str | None = None) -> Any:
    return memory.match(*keys_of(tokens, tenant), np.array(tokens, dtype=np.int64))


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


prompts = st.lists(
    st.tuples(st.sampled_from([None, "t"]), st.lists(st.integers(0, 1), min_size=1, max_size=20)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300)
@given(prompts, st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_the_furthest_one_is_found(remembered, new) -> None:
    memory = PromptMemory(PAGE, prompts=20)
    for number, (tenant, tokens) in enumerate(remembered):
        add(memory, f"r{number}", tokens, tenant)
    mine = [tokens for tenant, tokens in remembered if tenant is None]
    most = max((shared(new, tokens) for tokens in mine), default=0)
    found = match(memory, new)
    if not most:
        assert found is None
        return
    assert found.shared == most
    other = remembered[int(found.rid[1:])][1]
    assert shared(new, other) == most and list(found.other) == other
    ended = most in (len(new), len(other))
    assert found.position == (None if ended else most)


def test_a_prompt_that_goes_on_takes_its_own_place() -> None:
    memory = PromptMemory(PAGE, prompts=4)
    add(memory, "r", [1, 2, 3])
    add(memory, "r", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(memory) == 1 and memory.tokens == 9
    assert match(memory, [1, 2, 3, 4, 5, 6, 7, 8, 0]).position == 8


def test_bounds_are_kept_and_the_oldest_go() -> None:
    memory = PromptMemory(PAGE, prompts=3, tokens=20)
    for number in range(5):
        add(memory, f"r{number}", [number] * 5)
    assert len(memory) == 3 and match(memory, [0] * 5) is None and match(memory, [2] * 5).rid == "r2"
    add(memory, "long", [9] * 18)
    assert len(memory) == 1 and memory.tokens == 18
    add(memory, "longer", [8] * 21)
    assert memory.tokens == 18 and match(memory, [8] * 21) is None


def test_tenants_are_apart_and_can_be_forgotten() -> None:
    memory = PromptMemory(PAGE, prompts=4)
    add(memory, "a", [1, 2, 3, 4, 5], "a")
    add(memory, "none", [1, 2, 3, 4, 6])
    assert match(memory, [1, 2, 3, 4, 5], "b") is None
    assert match(memory, [1, 2, 3, 4, 5], "a").rid == "a"
    assert match(memory, [1, 2, 3, 4, 5]).rid == "none"
    memory.forget(keys_of([1], "a")[0])
    assert match(memory, [1, 2, 3, 4, 5], "a") is None and memory.get("a") is None
    assert list(memory.get("none")) == [1, 2, 3, 4, 6]
    memory.forget(None)
    assert len(memory) == 0 and memory.tokens == 0


def test_no_memory_at_all() -> None:
    memory = PromptMemory(PAGE, prompts=0)
    add(memory, "r", [1, 2])
    assert len(memory) == 0 and match(memory, [1, 2]) is None
