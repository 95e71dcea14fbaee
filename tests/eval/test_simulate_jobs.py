"""Pages of prompts and answers, and the closed loop that sends them."""

from __future__ import annotations

import random

import pytest

from eval.simulate.jobs import Naming
from eval.simulate.loop import ClosedLoop
from eval.workloads.order import closed_loop
from eval.workloads.sessions import Agent, Session, Turn, common


def turn(tokens: int, output: int, blocks: tuple[int, ...], gap_s: float = 0.0) -> Turn:
    return Turn(tokens, output, blocks, 0.0, gap_s, 0.0)


def jobs(*turns: Turn, block: int = 64):
    return Naming().jobs(Session("s", block, turns), "", turns)


def test_an_answer_has_the_names_that_the_next_prompt_gives_it() -> None:
    first, second = jobs(turn(130, 200, (1, 2)), turn(640, 5, tuple(range(1, 11))))
    # 130 + 199 computed tokens are 5 whole pages; the fifth ends before the answer does.
    assert first.prompt + first.answer == second.prompt[:5]


def test_pages_that_the_next_prompt_is_too_short_to_name_are_nobodys() -> None:
    first, second = jobs(turn(128, 260, (1, 2)), turn(388, 5, (1, 2, 3, 4, 5, 6)))
    assert first.pages == second.prompt
    first, second = jobs(turn(128, 257, (1, 2)), turn(385, 5, (1, 2, 3, 4, 5)))
    # 385 tokens are six pages, but the trace names five of them.
    assert first.pages[:5] == second.prompt[:5] and len(first.pages) == 6 and first.pages != second.prompt


@pytest.mark.parametrize(
    "following",
    [
        turn(300, 5, (1, 2, 3, 4)),  # shorter than prompt and answer: a part was dropped
        turn(640, 5, (1, 9, *range(3, 11))),  # the prompt was rewritten
    ],
)
def test_an_answer_that_is_not_kept_has_fresh_names(following: Turn) -> None:
    first, second = jobs(turn(130, 200, (1, 2)), following)
    assert not set(first.answer) & set(second.prompt) and len(first.answer) == 3


def test_the_last_answer_of_a_list_has_fresh_names() -> None:
    (only,) = jobs(turn(130, 200, (1, 2)))
    assert len(only.answer) == 3 and len(set(only.pages)) == 5


def test_the_last_token_of_an_answer_completes_no_page() -> None:
    assert len(jobs(turn(64, 64, (1,)))[0].answer) == 0
    assert len(jobs(turn(64, 65, (1,)))[0].answer) == 1


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    assert jobs(turn(128, 1, (1, 2)))[0].most_restored == 1
    assert jobs(turn(129, 1, (1, 2)))[0].most_restored == 2


def test_blocks_of_other_sizes_become_pages() -> None:
    small, other = jobs(turn(100, 1, (1, 2, 3, 4, 5, 6)), turn(100, 1, (1, 2, 3, 9, 5, 6)), block=16)
    assert len(small.prompt) == len(other.prompt) == 1 and small.prompt != other.prompt
    large, shorter = jobs(turn(512 + 130, 1, (7,)), turn(512, 1, (7,)), block=512)
    assert len(large.prompt) == 10 and large.prompt[:8] == shorter.prompt
    with pytest.raises(ValueError, match="blocks of 48 tokens neither divide a page of 64"):
        jobs(turn(100, 1, (1,)), block=48)


def test_ids_mean_the_same_in_all_sessions_only_where_the_trace_says_so() -> None:
    def pages(shared: bool) -> list[tuple[int, ...]]:
        naming = Naming()
        made = [Session(name, 64, (turn(128, 1, (1, 2)),), shared_ids=shared) for name in "ab"]
        return [naming.jobs(one, "", one.turns)[0].prompt for one in made]

    assert pages(True)[0] == pages(True)[1]
    assert not set(pages(False)[0]) & set(pages(False)[1])


def test_a_rewrite_leaves_the_prompt_before() -> None:
    found = jobs(turn(128, 1, (1, 2)), turn(192, 1, (1, 2, 3)), turn(192, 1, (1, 2, 4)), turn(130, 1, (1, 2)))
    assert [one.rewrite for one in found] == [False, False, True, True]


def test_common_is_what_both_begin_with() -> None:
    draw = random.Random(1)
    for _ in range(300):
        one = [draw.randrange(2) for _ in range(draw.randrange(40))]
        other = one[: draw.randrange(41)] + [draw.randrange(2) for _ in range(draw.randrange(10))]
        naive = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert common(one, other) == (min(len(one), len(other)) if naive is None else naive)


def run(sessions: list[Session], live: int, cap_s: float, service_s) -> list[tuple[float, str, str, int]]:
    """Serve a loop with a server that takes `service_s(turn)`; return what was sent when, in order."""
    loop = ClosedLoop(sessions, live, cap_s)
    due = list(enumerate(loop.start()))
    count, sent = len(due), []
    while due:
        due.sort(key=lambda one: (one[1].at_s, one[0]))
        _, now = due.pop(0)
        job = now.job
        sent.append((now.at_s, job.session, job.agent, job.turn))
        for one in loop.ended(now.turns, now.at_s + service_s(now.turns.turns[now.turns.next])):
            count += 1
            due.append((count, one))
    return sent


@pytest.mark.parametrize("seed", range(20))
def test_the_loop_sends_in_the_order_of_the_recorded_one_if_the_server_is_as_fast(seed: int) -> None:
    draw = random.Random(seed)

    def turns(count: int) -> tuple[Turn, ...]:
        return tuple(
            Turn(70, 1, (1,), 0.0, draw.uniform(0, 9), draw.uniform(0.1, 3)) for index in range(count)
        )

    sessions = [
        Session(
            f"s{number}",
            64,
            own := turns(draw.randrange(1, 5)),
            tuple(
                Agent(f"a{n}", draw.randrange(-1, len(own)), draw.uniform(0, 3), turns(draw.randrange(1, 3)))
                for n in range(draw.randrange(3))
            ),
        )
        for number in range(6)
    ]
    wanted = [(step.session.name, step.agent, step.index) for step in closed_loop(sessions, 3, 5.0)]
    sent = run(sessions, 3, 5.0, lambda turn: turn.service_s)
    assert [(session, agent, index) for _, session, agent, index in sent] == wanted


def test_a_parent_waits_for_all_its_agents_and_its_own_pause() -> None:
    agents = (
        Agent("x", 0, 1.0, (turn(64, 1, ()), turn(64, 1, (), gap_s=4.0))),
        Agent("y", 0, 90.0, (turn(64, 1, ()),)),
    )
    session = Session("s", 64, (turn(64, 1, ()), turn(64, 1, (), gap_s=3.0)), agents)
    sent = run([session], 1, 10.0, lambda _: 2.0)
    assert sent == [
        (0.0, "s", "", 0),
        (3.0, "s", "x", 0),
        (9.0, "s", "x", 1),  # 5 + 4
        (12.0, "s", "y", 0),  # 2 + the cap
        (14.0, "s", "", 1),
    ]


def test_sessions_follow_each_other_in_order() -> None:
    made = [Session(name, 64, (turn(64, 1, ()),)) for name in "abcde"]
    sent = run(made, 2, 10.0, lambda _: 1.0)
    assert [(at, session) for at, session, *_ in sent] == [
        (0.0, "a"), (0.0, "b"), (1.0, "c"), (1.0, "d"), (2.0, "e"),
    ]  # fmt: skip


@pytest.mark.parametrize(("live", "cap_s"), [(0, 1.0), (1, -1.0)])
def test_what_is_no_loop_is_an_error(live: int, cap_s: float) -> None:
    with pytest.raises(ValueError, match="are no closed loop"):
        ClosedLoop([], live, cap_s)
