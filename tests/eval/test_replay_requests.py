"""What prompts and recorded answers are made of sessions, and the bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from eval.replay.requests import PAGE, Request, SessionRequests, Shape, build, digest, working_set
from eval.workloads.order import closed_loop
from eval.workloads.sessions import Agent, Session, Turn

SHAPE = Shape(tokens_per_block=4)


def turn(tokens: int, output: int = 64, blocks: tuple[int, ...] | None = None, gap_s: float = 10.0) -> Turn:
    """A turn of an append-only session, unless blocks are given."""
    return Turn(tokens, output, tuple(range(tokens // 64)) if blocks is None else blocks, 0.0, gap_s, 1.0)


def made(*turns: Turn, shape: Shape = SHAPE) -> tuple[Request, ...]:
    return build([Session("s", 64, turns)], shape)[0].requests


def test_an_answer_follows_its_prompt_in_the_next_one() -> None:
    # 40 blocks and 32 tokens, 128 tokens said, 60 blocks: 2 + 8 scaled tokens after 160.
    first, second = made(turn(2592, 128), turn(3840))
    assert (len(first.prompt), len(first.output), len(second.prompt)) == (162, 8, 240)
    assert second.prompt[:170] == first.prompt + first.output


def test_rests_that_lie_in_the_same_block_continue_each_other() -> None:
    first, second, third = made(turn(2592, 1), turn(2608, 1), turn(2640, 1))
    assert [len(one.prompt) for one in (first, second, third)] == [162, 163, 165]
    assert third.prompt[:163] == second.prompt
    assert second.prompt[:162] == first.prompt


def test_what_the_next_prompt_has_no_room_for_is_new() -> None:
    first, second = made(turn(2560, 640), turn(2688))
    assert len(first.output) == 40
    assert first.output[:8] == second.prompt[160:]


def test_an_answer_that_no_prompt_continues_is_new_in_every_turn() -> None:
    changed = (*range(39), 99)
    first, second, third = made(turn(2560, 640), turn(2560, 640, changed), turn(2560, 640, (7,) * 40))
    assert first.prompt[:156] == second.prompt[:156]
    assert first.prompt[156] != second.prompt[156]
    assert len({tuple(one.output) for one in (first, second, third)}) == 3
    assert [one.rewrite for one in (first, second, third)] == [False, True, True]


def test_a_shorter_prompt_of_the_same_blocks_keeps_its_own_rest() -> None:
    first, second = made(turn(2608, 1), turn(2592, 1))
    assert first.prompt[:160] == second.prompt[:160]
    assert not second.rewrite


def random_session(draw: random.Random, name: str) -> Session:
    """Grows by random steps, sometimes goes back and changes what follows; sometimes has an agent."""

    def turns(count: int, base: int) -> tuple[Turn, ...]:
        blocks: list[int] = []
        found = []
        for _ in range(count):
            if blocks and draw.random() < 0.3:
                del blocks[draw.randrange(len(blocks)) :]
            blocks += [base + draw.randrange(1000) for _ in range(draw.randint(0, 60))]
            tokens = 64 * len(blocks) + draw.randint(1 if not blocks else 0, 63)
            found.append(turn(tokens, draw.randint(1, 4000), tuple(blocks), draw.uniform(0, 100)))
        return tuple(found)

    own = turns(draw.randint(1, 6), 0)
    agents = (Agent("a", draw.randrange(len(own)), draw.uniform(0, 9), turns(3, draw.choice([0, 5000]))),)
    return Session(name, 64, own, agents if draw.random() < 0.5 else ())


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_the_bound_is_the_longest_prefix_of_anything_before(seed, recorded) -> None:
    draw = random.Random(seed)
    sessions = [random_session(draw, f"s{number}") for number in range(4)]
    shape = replace(SHAPE, live=2, recorded_outputs=recorded)
    by_key = {one.key: one for session in build(sessions, shape) for one in session.all_requests()}
    seen: list[list[int]] = []
    for step in closed_loop(sessions, 2, shape.longest_gap_s):
        one = by_key[step.session.name, step.agent, step.index]
        prompt = list(one.prompt)
        longest = 0
        for text in seen:
            same = 0
            while same < min(len(text), len(prompt) - 1) and text[same] == prompt[same]:
                same += 1
            longest = max(longest, same // PAGE * PAGE)
        assert one.reusable == longest
        seen.append(prompt + list(one.output)[:-1] if recorded else prompt)


def test_same_sessions_same_requests_and_other_ones_another_digest() -> None:
    sessions = [Session("s", 64, (turn(640), turn(1280)))]
    once, again = build(sessions, SHAPE), build(sessions, SHAPE)
    assert once == again
    assert digest(once) == digest(again)
    others = [
        build(sessions, replace(SHAPE, time_scale=0.5)),
        build(sessions, replace(SHAPE, first_id=1)),
        build([replace(sessions[0], name="t")], SHAPE),
        build([Session("s", 64, (turn(640), turn(1344)))], SHAPE),
    ]
    assert len({digest(one) for one in (once, *others)}) == 5


def test_pauses_are_cut_then_scaled_and_ids_are_moved() -> None:
    shape = replace(SHAPE, longest_gap_s=8.0, first_id=1000, vocabulary=300)
    first, second = made(turn(640, gap_s=99.0), turn(1280, gap_s=99.0), shape=shape)
    assert (first.gap_s, second.gap_s) == (0.0, 0.5)
    assert made(turn(640), turn(1280), shape=replace(shape, time_scale=0.25))[1].gap_s == 2.0
    assert min(first.prompt + first.output) >= 1000
    assert max(first.prompt + first.output) < 1300
    agent = Agent("a", 0, 99.0, (turn(640),))
    session = build([Session("s", 128, (turn(1280, blocks=tuple(range(10))),), (agent,))], replace(shape))[0]
    assert session.agents[0].delay_s == 8.0 * 4 / 128


def test_every_page_counts_once_in_the_working_set() -> None:
    sessions = build([Session("s", 64, (turn(64 * 32, 64 * 16), turn(64 * 64, 64)))], SHAPE)
    # Prompts of 128 and 256 tokens; the answer of 64 is in the second, that of 4 makes no page.
    assert working_set(sessions) == 256
    assert working_set(sessions[:0]) == 0


def test_two_lists_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="names tell them apart"):
        build([Session("s", 64, (turn(640),)), Session("s", 64, (turn(640),))], SHAPE)


def test_all_requests_are_the_own_and_the_agents() -> None:
    session = build([Session("s", 64, (turn(640),), (Agent("a", 0, 1.0, (turn(640), turn(704))),))], SHAPE)[0]
    assert isinstance(session, SessionRequests)
    assert [one.key for one in session.all_requests()] == [("s", "", 0), ("s", "a", 0), ("s", "a", 1)]
