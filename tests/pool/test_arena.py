"""The arena against a model: no page twice, counts right, and room is room whatever happened before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.pool import HostArena, Kind, PageError

PAGES = 24


class Model:
    """What was handed out, by holder."""

    def __init__(self) -> None:
        self.held: list[tuple[Kind, list[int]]] = []

    def pages(self, kind: Kind) -> list[int]:
        return [page for holder, pages in self.held if holder is kind for page in pages]


steps = st.lists(
    st.tuples(
        st.sampled_from(["kv", "states", "free", "part"]), st.integers(0, PAGES + 3), st.integers(0, 1000)
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(steps)
def test_any_history(history) -> None:
    arena, model = HostArena(PAGES, 4096), Model()
    taken = peak = 0
    for action, count, pick in history:
        if action in ("kv", "states"):
            kind, free = Kind(action), arena.free_pages
            got = arena.allocate(count, kind)
            assert (got is None) == (count > free)  # any n up to what is free, whatever the history
            if got is not None:
                assert len(got) == count
                model.held.append((kind, got))
        elif model.held:
            kind, pages = model.held.pop(pick % len(model.held))
            if action == "part" and len(pages) > 1:  # a node of the tree was split, one half goes
                model.held.append((kind, pages[1:]))
                pages = pages[:1]
            arena.free(pages, kind)
        held = model.pages(Kind.KV) + model.pages(Kind.STATE)
        taken += count if action in ("kv", "states") and got is not None else 0
        peak = max(peak, len(held))
        assert (arena.taken_pages, arena.peak_pages) == (taken, peak)
        assert len(set(held)) == len(held) and all(0 <= page < PAGES for page in held)
        assert arena.free_pages == PAGES - len(held)
        for kind in Kind:
            assert arena.used_pages(kind) == len(model.pages(kind))
            assert arena.used_bytes(kind) == len(model.pages(kind)) * 4096
        assert sum(map(arena.used_bytes, Kind)) + arena.free_bytes == arena.total_bytes == PAGES * 4096


@settings(max_examples=100)
@given(steps)
def test_the_same_calls_give_the_same_pages(history) -> None:
    def play() -> list[object]:
        arena, held, seen = HostArena(PAGES, 1), [], []
        for action, count, pick in history:
            if action in ("kv", "states"):
                pages = arena.allocate(count, Kind(action))
                seen.append(pages)
                if pages:
                    held.append((pages, Kind(action)))
            elif held:
                arena.free(*held.pop(pick % len(held)))
        return seen

    assert play() == play()


def test_all_or_nothing() -> None:
    arena = HostArena(4, 10)
    assert arena.allocate(5, Kind.KV) is None and arena.free_pages == 4
    assert sorted(arena.allocate(4, Kind.KV) or []) == [0, 1, 2, 3]
    assert arena.allocate(1, Kind.STATE) is None and arena.allocate(0, Kind.STATE) == []


def test_scattered_pages_are_enough_for_a_large_object() -> None:
    arena = HostArena(8, 10)
    pages = arena.allocate(8, Kind.KV) or []
    arena.free(pages[::2], Kind.KV)  # no two free pages are neighbours
    assert arena.pages_for(31) == 4
    assert len(arena.allocate(4, Kind.STATE) or []) == 4


@pytest.mark.parametrize(
    ("pages", "kind", "complaint"),
    [
        ([7], Kind.KV, "page 7 is not one of the 4 pages"),
        ([-1], Kind.KV, "page -1 is not one of"),
        ([3], Kind.KV, "page 3 was given back for kv but is held by nobody"),
        ([0], Kind.STATE, "page 0 was given back for states but is held by kv"),
        ([0, 0], Kind.KV, "twice"),
        ([0, 3], Kind.KV, "held by nobody"),
    ],
)
def test_what_is_not_held_cannot_be_given_back(pages, kind, complaint) -> None:
    arena = HostArena(4, 10)
    assert arena.allocate(2, Kind.KV) == [0, 1]
    with pytest.raises(PageError, match=complaint):
        arena.free(pages, kind)
    assert arena.used_pages(Kind.KV) == 2 and arena.free_pages == 2  # nothing was taken


def test_clear_takes_one_kind() -> None:
    arena = HostArena(6, 10)
    arena.allocate(2, Kind.KV), arena.allocate(3, Kind.STATE)
    arena.clear(Kind.STATE)
    assert (arena.used_pages(Kind.KV), arena.used_pages(Kind.STATE), arena.free_pages) == (2, 0, 4)
    arena.clear(Kind.KV)
    assert len(set(arena.allocate(6, Kind.KV) or [])) == 6


def test_the_memory_is_the_pages() -> None:
    arena = HostArena(3, 4096)
    assert arena.memory.nbytes == arena.total_bytes and not arena.memory.any()
    arena.memory[:] = 1
    with pytest.raises(ValueError):
        HostArena(0, 4096)
