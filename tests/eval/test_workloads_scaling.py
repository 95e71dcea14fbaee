"""Scaled prompts share what the recorded ones share, token by token; the order of requests is the recorded one."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.workloads.order import closed_loop
from eval.workloads.scaling import Scaling
from eval.workloads.sessions import Agent, Session, Turn

BLOCK = 64


def turn(blocks: tuple[int, ...], rest: int = 0, out: int = 1, gap: float = 0.0, took: float = 1.0) -> Turn:
    return Turn(len(blocks) * BLOCK + rest, out, blocks, 0.0, gap, took)


def common(first: object, second: object) -> int:
    pairs = zip(first, second, strict=False)  # type: ignore[call-overload]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# Few ids, so that prompts often begin alike and part at every place.
PROMPTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 5), max_size=12), st.integers(0, BLOCK - 1)),
    min_size=2,
    max_size=12,
)


@given(prompts=PROMPTS, per_block=st.sampled_from([1, 2, 4, 8, 16, 32, 64]), shared=st.booleans())
@settings(max_examples=200)
def test_prompts_share_exactly_the_tokens_of_the_blocks_they_share(
    prompts: list[tuple[str, list[int], int]], per_block: int, shared: bool
) -> None:
    scaling = Scaling(per_block, vocabulary=64)
    scaled = []
    for name, ids, rest in prompts:
        one = turn(tuple(ids), rest or 1)
        session = Session(name, BLOCK, (one,), shared_ids=shared)
        blocks = [number if shared else (name, number) for number in ids]
        scaled.append((blocks, rest, scaling.prompt(session, one)))
    for blocks, rest, prompt in scaled:
        left = (rest or 1) * per_block // BLOCK
        assert len(prompt.tokens) == max(len(blocks) * per_block + left, 1)
        assert all(0 <= token < 64 for token in prompt.tokens)
    for index, (blocks, _, prompt) in enumerate(scaled):
        for others, _, other in scaled[:index]:
            same = common(blocks, others)
            assert common(prompt.prefixes, other.prefixes) == same
            assert common(prompt.tokens, other.tokens) == same * per_block


def test_the_same_calls_give_the_same_tokens() -> None:
    one = turn((3, 1, 4), rest=40)
    session = Session("s", BLOCK, (one,))
    assert Scaling(4, 256).prompt(session, one) == Scaling(4, 256).prompt(session, one)


def test_more_alternatives_than_tokens_still_differ_within_a_block() -> None:
    scaling, vocabulary = Scaling(2, 8), 8
    first = [scaling.prompt(Session(f"{n}", BLOCK, ()), turn((1,))).tokens for n in range(vocabulary**2)]
    assert len({tuple(tokens) for tokens in first}) == vocabulary**2
    narrow = Scaling(1, 8)
    with pytest.raises(ValueError, match="use more tokens a block"):
        for n in range(9):
            narrow.prompt(Session(f"{n}", BLOCK, ()), turn((1,)))


@given(
    prompts=PROMPTS,
    sizes=st.sampled_from([(16, 4), (16, 16), (64, 4), (64, 64), (512, 32), (512, 64), (512, 512)]),
)
@settings(max_examples=100)
def test_pages_have_equal_names_exactly_where_their_tokens_are_equal_up_to_there(
    prompts: list[tuple[str, list[int], int]], sizes: tuple[int, int]
) -> None:
    block, per_block = sizes
    scaling, lengths_only = Scaling(per_block, 256), Scaling(per_block, 256)
    seen: dict[tuple[int, ...], int] = {}
    for name, ids, rest in prompts:
        one = Turn(len(ids) * block + (rest * block // BLOCK or 1), 1, tuple(ids), 0.0, 0.0, 0.0)
        session = Session(name, block, (one,))
        prompt = scaling.prompt(session, one)
        assert lengths_only.pages(session, one) == (len(prompt.tokens), prompt.pages)
        assert len(prompt.pages) == len(prompt.tokens) // 64
        if per_block == block:
            assert len(prompt.tokens) == one.input_tokens
        for number, page in enumerate(prompt.pages, 1):
            assert seen.setdefault(tuple(prompt.tokens[: 64 * number]), page) == page
    assert len(set(seen.values())) == len(seen)


def test_a_rest_of_several_pages_is_in_no_other_prompt() -> None:
    scaling, one = Scaling(512, 256), Turn(512 + 300, 1, (7,), 0.0, 0.0, 0.0)
    first, second = (scaling.prompt(Session("s", 512, (one,)), one).pages for _ in range(2))
    assert first[:8] == second[:8] and len(first) == len(second) == 12
    assert not set(first[8:]) & set(second[8:])


def test_outputs_shrink_alike_within_bounds() -> None:
    session = Session("s", BLOCK, ())
    lengths = [
        Scaling(4, 256).output_tokens(session, turn((), 1, out=out), 8) for out in (0, 1, 17, 100, 9000)
    ]
    assert lengths == [1, 1, 2, 7, 8]


@pytest.mark.parametrize(("per_block", "vocabulary"), [(0, 256), (3, 256), (96, 256), (4, 1)])
def test_a_page_is_a_whole_number_of_blocks(per_block: int, vocabulary: int) -> None:
    with pytest.raises(ValueError, match=r"page|vocabulary"):
        Scaling(per_block, vocabulary)


def names(steps: list) -> list[str]:
    return [f"{step.session.name}{step.agent}{step.index}" for step in steps]


def test_sessions_take_turns_as_their_pauses_say() -> None:
    quick = Session("q", BLOCK, (turn((1,)), turn((1,), gap=1.0), turn((1,), gap=1.0)))
    slow = Session("s", BLOCK, (turn((2,)), turn((2,), gap=100.0)))
    last = Session("l", BLOCK, (turn((3,)),))
    assert names(closed_loop([quick, slow, last], 2, 1000.0)) == ["q0", "s0", "q1", "q2", "l0", "s1"]
    assert names(closed_loop([quick, slow, last], 2, 0.0)) == ["q0", "s0", "q1", "s1", "q2", "l0"]
    assert names(closed_loop([quick, slow, last], 1, 60.0)) == ["q0", "q1", "q2", "s0", "s1", "l0"]


def test_a_parent_waits_for_its_agents() -> None:
    agents = (
        Agent("x", 0, 0.0, (turn((7,)), turn((7,), gap=50.0))),
        Agent("y", 0, 10.0, (turn((8,)),)),
        Agent("z", 1, 0.0, (turn((9,)),)),
    )
    session = Session("p", BLOCK, (turn((1,)), turn((1,), gap=1.0)), agents)
    only_agents = Session("o", BLOCK, (), (Agent("a", -1, 0.0, (turn((1,)),)),))
    steps = closed_loop([session, only_agents, Session("e", BLOCK, ())], 1, 60.0)
    assert names(steps) == ["p0", "px0", "py0", "px1", "p1", "pz0", "oa0"]


@pytest.mark.parametrize(("live", "gap"), [(0, 1.0), (1, -1.0)])
def test_a_loop_needs_a_session_and_time(live: int, gap: float) -> None:
    with pytest.raises(ValueError, match="no closed loop"):
        closed_loop([], live, gap)
