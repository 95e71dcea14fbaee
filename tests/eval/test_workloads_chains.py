"""Sessions found by their text: appended and cut prompts stay together, others do not; parallel threads are split."""

from __future__ import annotations

import random

import pytest
from trace_files import SHARED

from eval.workloads import interleaved, weka
from eval.workloads.chains import TRUNK_BRANCHES, Request, chained, sessions_of, single
from eval.workloads.sessions import Agent, Session, Turn, common


def request(at: float, blocks: list[int], owner: str = "", number: int = 0) -> Request:
    return Request(at, 64 * len(blocks) + 1, 5, tuple(blocks), owner=owner, number=number)


def numbers(groups: list[list[Request]]) -> list[list[int]]:
    return [[one.number for one in group] for group in groups]


def test_interleaved_conversations_are_told_apart() -> None:
    """Conversations that share a system prompt and grow at random, in random order: each comes out whole."""
    for seed in range(20):
        draw = random.Random(seed)
        trunk = list(range(draw.randint(0, 5)))
        texts = [[*trunk, 1000 * (one + 1)] for one in range(TRUNK_BRANCHES + draw.randint(0, 5))]
        expected: list[list[int]] = []
        place: dict[int, int] = {}
        requests = []
        for number in range(60):
            who = draw.randrange(len(texts))
            texts[who] += range(texts[who][-1] + 1, texts[who][-1] + 1 + draw.randint(0, 4))
            requests.append(request(number, texts[who], number=number))
            if who not in place:
                place[who] = len(expected)
                expected.append([])
            expected[place[who]].append(number)
        if len(place) >= TRUNK_BRANCHES:  # fewer branches are no trunk
            assert numbers(chained(requests)) == expected


def test_a_prompt_that_drops_its_end_stays_and_one_that_drops_nearly_all_does_not() -> None:
    base = list(range(20))
    cut = request(1, [*base[:12], 50, 51], number=1)
    other = request(2, [*base[:2], 60, 61, 62, 63, 64, 65], number=2)
    assert numbers(chained([request(0, base), cut, other])) == [[0, 1], [2]]


def test_a_return_to_an_older_branch_is_of_the_session_that_had_it() -> None:
    groups = chained(
        [request(0, [1, 2, 3]), request(1, [1, 2, 4], number=1), request(2, [1, 2, 3, 5], number=2)]
    )
    assert numbers(groups) == [[0, 1, 2]]


def test_owners_and_empty_prompts_are_kept_apart() -> None:
    same = [request(0, [1, 2], "x"), request(1, [1, 2], "y", 1), request(2, [1, 2], "x", 2)]
    assert numbers(chained(same)) == [[0, 2], [1]]
    assert numbers(chained([request(0, []), request(1, [], number=1)])) == [[0], [1]]


def test_sessions_have_the_files_clock_and_pauses() -> None:
    first = [Request(10.0, 70, 3, (1,), 2.0), Request(15.0, 140, 4, (1, 2))]
    one, two = sessions_of([first, [Request(12.0, 5, 1, ())]], 64)
    assert (one.start_s, two.start_s, one.shared_ids) == (0.0, 2.0, True)
    assert [(turn.start_s, turn.gap_s) for turn in one.turns] == [(0.0, 0.0), (5.0, 3.0)]
    assert [len(group) for group in single(first)] == [1, 1]


def turn(at: float, blocks: list[int], took: float = 1.0) -> Turn:
    return Turn(64 * len(blocks) + 1, 1, tuple(blocks), at, 9.0, took)


A1, A2, A3 = [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]
B1, B2 = [1, 20, 21, 22], [1, 20, 21, 22, 23]


def test_threads_that_alternate_become_agents_with_the_recorded_pauses() -> None:
    listed = Session("s", 64, tuple(turn(t, b) for t, b in [(0, A1), (5, B1), (9, A2), (11, B2), (20, A3)]))
    found = interleaved.split(listed)
    (agent,) = found.agents
    assert [list(one.blocks) for one in found.turns] == [A1, A2, A3]
    assert [one.gap_s for one in found.turns] == [0.0, 8.0, 10.0]
    assert (agent.name, agent.after, agent.delay_s) == ("thread_001", 0, 4.0)
    assert [list(one.blocks) for one in agent.turns] == [B1, B2]
    assert [one.gap_s for one in agent.turns] == [0.0, 5.0]


def test_a_text_that_was_summed_up_is_the_same_thread() -> None:
    listed = Session("s", 64, tuple(turn(t, b) for t, b in [(0, A1), (5, A2), (9, B1), (11, B2)]))
    assert interleaved.split(listed) == listed


def test_recorded_agents_stay_after_the_turn_before_them() -> None:
    agent = Agent("x", 2, 0.5, (turn(7, [90]),))
    turns = tuple(turn(t, b) for t, b in [(0, A1), (3, B1), (6, B2), (9, A2)])
    found = interleaved.split(Session("s", 64, turns, (agent,)))
    assert [(one.name, one.after) for one in found.agents] == [("x", 0), ("thread_001", 0)]
    assert found.requests == 5


@pytest.mark.skipif(not SHARED.exists(), reason="no recorded traces beside the repository")
def test_recorded_sessions_keep_all_their_requests() -> None:
    for session in weka.read_sessions(SHARED / "weka_cc/samples"):
        found = interleaved.split(session)
        assert sorted(one.start_s for one in found.all_turns()) == sorted(
            one.start_s for one in session.all_turns()
        )


def test_common_counts_equal_items() -> None:
    draw = random.Random(7)
    for _ in range(500):
        first = [draw.randint(0, 1) for _ in range(draw.randint(0, 12))]
        second = [draw.randint(0, 1) for _ in range(draw.randint(0, 12))]
        expected = 0
        while expected < min(len(first), len(second)) and first[expected] == second[expected]:
            expected += 1
        assert common(first, second) == expected
