"""Selections of sessions, and the published list that must come out exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trace_files import SHARED, write

from eval.workloads.load import read
from eval.workloads.select import BadSelection, cut_before, listed, read_listing, select
from eval.workloads.sessions import Agent, Session, Turn

W125 = SHARED / "weka_cc/w125.json"
TRACE = SHARED / "weka_cc/weka_cc_710.jsonl.xz"


def turn(tokens: int, out: int = 0) -> Turn:
    return Turn(tokens, out, (), 0.0, 0.0, 0.0)


def session(name: str, *turns: Turn, agents: tuple[Agent, ...] = ()) -> Session:
    return Session(name, 64, turns, agents)


def sizes(found: Session) -> tuple[list[int], list[list[int]]]:
    return [t.input_tokens for t in found.turns], [[t.input_tokens for t in a.turns] for a in found.agents]


def test_a_session_and_its_agents_are_one_list_that_the_first_full_request_ends() -> None:
    early = Agent("e", -1, 0.0, (turn(1),))
    long = Agent("l", 0, 0.0, (turn(5), turn(100), turn(6)))
    late = Agent("z", 0, 0.0, (turn(7),))
    whole = session("s", turn(10), turn(20), agents=(early, long, late))

    def cut(context: int) -> tuple[list[int], list[list[int]]]:
        (found,) = cut_before([whole], context)
        return sizes(found)

    assert cut(100) == ([10, 20], [[1], [5, 100, 6], [7]])
    assert cut(99) == (
        [10],
        [[1], [5]],
    )  # the agent's second request is full: neither its third nor what follows
    assert cut(9) == ([], [[1]])
    assert not list(cut_before([whole], 0))


def test_prompt_and_output_count_together() -> None:
    (found,) = cut_before([session("s", turn(60, 4), turn(60, 5))], 64)
    assert sizes(found) == ([60], [])


def test_sessions_of_a_list_are_left_out(tmp_path) -> None:
    file = write(tmp_path, "some.json", {"ids": ["b", "x"], "sessions": 1, "requests": 1})
    some = [session("a", turn(1)), session("b", turn(1)), session("c", turn(1))]
    assert [s.name for s in select(some, f"without:{file}")] == ["a", "c"]
    assert [s.name for s in select(some, f"without:{file},first:1")] == ["a"]
    with pytest.raises(BadSelection, match="cannot be read"):
        list(select(some, f"without:{tmp_path / 'none.json'}"))
    with pytest.raises(BadSelection, match="selects nothing"):
        list(select(some, "without:"))


def test_steps_are_taken_from_left_to_right() -> None:
    some = [session("a1", turn(9), turn(5)), session("b", turn(1)), session("a2"), session("a3", turn(2))]
    assert [s.name for s in select(some)] == ["a1", "b", "a2", "a3"]
    assert [s.name for s in select(some, "only:a, first:2")] == ["a1", "a3"]
    assert [s.name for s in select(some, "context:5,first:1")] == ["b"]
    assert [s.name for s in select(some, "first:1,context:5")] == []


def test_no_more_is_read_than_is_selected() -> None:
    def endless() -> Iterator[Session]:
        for number in range(3):
            yield session(str(number), turn(1))
        raise AssertionError("read on")

    assert len(list(select(endless(), "context:5,first:3"))) == 3


@pytest.mark.parametrize("text", ["last:3", "only:", "first", "w12"])
def test_what_selects_nothing_is_named(text: str) -> None:
    with pytest.raises(BadSelection, match=f"^{text} selects nothing|^{text}: a number above 0"):
        list(select([], text))


@pytest.mark.parametrize("text", ["first:0", "context:x", "first:-1"])
def test_numbers_are_above_zero(text: str) -> None:
    with pytest.raises(BadSelection, match=f"{text}: a number above 0 is expected"):
        list(select([], text))


def test_a_list_has_to_match_the_trace(tmp_path: Path) -> None:
    file = write(tmp_path, "w125.json", {"ids": ["a", "b"], "sessions": 2, "requests": 3})
    good = [session("b", turn(1)), session("x", turn(1)), session("a", turn(2), turn(3), turn(131_073))]
    assert [s.name for s in select(good, "w125", tmp_path / "trace.jsonl")] == ["b", "a"]
    assert [s.name for s in select(good, f"w125:{file}")] == ["b", "a"]
    with pytest.raises(BadSelection, match="lists b, which the trace has not"):
        listed(good[1:], read_listing(file))
    with pytest.raises(BadSelection, match="lists 2 sessions with 3 requests; this trace has 2 with 2"):
        listed([session("a", turn(1)), session("b", turn(1))], read_listing(file))
    with pytest.raises(BadSelection, match=r"w125 needs its list, and .* cannot be read"):
        list(select(good, "w125", tmp_path / "elsewhere" / "trace.jsonl"))


@pytest.mark.skipif(not W125.exists(), reason="no recorded traces beside the repository")
def test_the_published_list_comes_out() -> None:
    """125 sessions with 3,785 requests, in the trace's order, none of them over the context."""
    listing = read_listing(W125)
    found = list(select(read(TRACE), "w125", TRACE))
    assert (
        (len(found), sum(one.requests for one in found))
        == (125, 3785)
        == (listing.sessions, listing.requests)
    )
    assert [one.name for one in found] == list(listing.ids)
    assert all(t.input_tokens + t.output_tokens <= 131_072 for one in found for t in one.all_turns())
