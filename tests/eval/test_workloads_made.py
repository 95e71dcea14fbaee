"""Workloads that are made: the paper's rewriting sessions, Codex sessions with published aggregates, shared prefixes."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from eval.workloads.adversarial import Adversarial, Kind, adversarial_sessions
from eval.workloads.codex import REQUESTS, SESSIONS, CodexSession, codex_sessions, codex_workload
from eval.workloads.codex_stats import (
    PUBLISHED,
    PUBLISHED_BIN_ROUNDS,
    Aggregates,
    aggregates,
    rounds_by_prefix,
)
from eval.workloads.rewriting import (
    SHARES,
    After,
    Depth,
    Rewriting,
    discarded_blocks,
    rewriting_requests,
    rewriting_sessions,
)
from eval.workloads.sessions import Agent, Session, Turn, common
from eval.workloads.shared_prefix import with_shared_prefix
from eval.workloads.tracelab import Reading

TURN = 8192 // 64


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("after", After)
@pytest.mark.parametrize("depth", Depth)
def test_rewriting_requests_part_from_the_prompt_before_and_others_extend_it(
    share: float, after: After, depth: Depth
) -> None:
    what = Rewriting(share, depth=depth, after=after, seed=3)
    sessions, chosen = rewriting_sessions(what), rewriting_requests(what)
    assert len(chosen) == round(share * 24 * 16) and all(turn > 0 for _, turn in chosen)
    for number, session in enumerate(sessions):
        seen: set[int] = set()
        before: tuple[int, ...] = ()
        for index, turn in enumerate(session.turns):
            shared = common(before, turn.blocks)
            rewrites = (number, index) in chosen
            assert (shared < len(before)) == rewrites
            assert not set(turn.blocks[shared:]) & seen  # nothing that was discarded comes back
            replaced = len(before) - shared if after is After.REPLACE else 0
            assert len(turn.blocks) - shared == TURN + replaced
            if after is After.REPLACE or not rewrites:
                assert len(turn.blocks) == len(before) + TURN
            assert turn.input_tokens == 64 * len(turn.blocks)
            seen |= set(turn.blocks)
            before = turn.blocks


def test_without_rewrites_sessions_grow_to_131072_tokens() -> None:
    sessions = rewriting_sessions(Rewriting(0.0))
    assert len(sessions) == 24 and {len(session.turns) for session in sessions} == {16}
    assert {session.turns[-1].input_tokens for session in sessions} == {131_072}


def test_a_higher_share_rewrites_what_a_lower_one_does_and_seeds_decide_alone() -> None:
    levels = [rewriting_requests(Rewriting(share)) for share in SHARES]
    assert all(low < high for low, high in pairwise(levels))
    assert rewriting_sessions(Rewriting(0.1, seed=5)) == rewriting_sessions(Rewriting(0.1, seed=5))
    assert rewriting_requests(Rewriting(0.1, seed=5)) != rewriting_requests(Rewriting(0.1, seed=6))
    assert Rewriting(0.1, seed=5).name != Rewriting(0.1, seed=6).name


def test_depths_are_distributed_as_they_say() -> None:
    draw = random.Random(1)
    length, count = 1000, 20_000
    found = {
        depth: sorted(discarded_blocks(draw, length, depth, TURN) for _ in range(count)) for depth in Depth
    }
    assert all(depths[0] >= 1 and depths[-1] <= length for depths in found.values())
    for share in (0.1, 0.5, 0.9):
        assert found[Depth.UNIFORM][int(share * count)] == pytest.approx(share * length, rel=0.05)
        expected = min(-math.log(1 - share) * TURN, length)
        assert found[Depth.RECENT][int(share * count)] == pytest.approx(expected, rel=0.07)
    weka = found[Depth.WEKA]
    total = 0.78 + 0.15 + 0.12 + 1.59 + 0.17
    for low, high, weight in ((2, 4, 0.78), (5, 99, 0.15), (101, 499, 0.12), (501, 999, 1.59)):
        inside = sum(low <= depth <= high for depth in weka) / count
        assert inside == pytest.approx(weight / total, abs=0.012)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("depth", Depth)
def test_short_prompts_lose_one_block_at_least_and_no_more_than_they_have(length: int, depth: Depth) -> None:
    draw = random.Random(2)
    assert all(1 <= discarded_blocks(draw, length, depth, TURN) <= length for _ in range(300))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0.95}, "share 0.95 is not between 0 and 0.9375"),
        ({"share": -0.1}, "share -0.1 is not between"),
        ({"sessions": 0}, "sessions 0 is not above 0"),
        ({"new_tokens": 100}, "new_tokens 100 is no positive multiple of 64"),
        ({"pause_s": math.inf}, "pause_s inf is no time"),
    ],
)
def test_parameters_out_of_range_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Rewriting(0.1), **change)  # type: ignore[arg-type]


def aggregates_of(made: list[CodexSession]) -> Aggregates:
    return aggregates([(one.rounds, one.users) for one in made])


# How far the made sessions may be from the published figures: a share of the figure (counts, seconds) or points.
WITHIN = {
    "prefix_p50": 0.16, "prefix_p99": 0.09, "append_p50": 0.10, "output_p50": 0.06,
    "human_wait_p50_s": 0.30, "tool_wait_p50_s": 0.15, "tool_wait_p90_s": 0.15, "generation_p50_s": 0.25,
}  # fmt: skip
POINTS = {
    "hit": 0.004, "hit_user": 0.03, "hit_tool": 0.005, "shrinking": 0.007, "sessions_with_compaction": 0.06,
    "waits_under_5min": 0.05, "waits_under_1h": 0.04,
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_codex_sessions_have_the_published_aggregates(seed: int) -> None:
    made, published = asdict(aggregates_of(codex_sessions(seed=seed))), asdict(PUBLISHED)
    assert set(WITHIN) | set(POINTS) == set(published)
    for name, share in WITHIN.items():
        assert made[name] == pytest.approx(published[name], rel=share), name
    for name, points in POINTS.items():
        assert made[name] == pytest.approx(published[name], abs=points), name


def test_codex_rounds_are_spread_over_prefix_lengths_as_published() -> None:
    made = [one for session in codex_sessions() for one in session.rounds]
    bins = [len(one) / len(made) for one in rounds_by_prefix(made)]
    published = [count / sum(PUBLISHED_BIN_ROUNDS) for count in PUBLISHED_BIN_ROUNDS]
    assert sum(abs(a - b) for a, b in zip(bins, published, strict=True)) / 2 < 0.12  # total variation


def test_codex_sessions_are_as_many_as_asked_and_the_same_for_a_seed() -> None:
    made = codex_sessions()
    assert (len(made), sum(len(one.rounds) for one in made)) == (SESSIONS, REQUESTS) == (68, 4791)
    assert made == codex_sessions() and made != codex_sessions(seed=1)
    few = codex_sessions(5, 9, seed=4)
    assert sum(len(one.rounds) for one in few) == 9 and all(one.rounds for one in few)
    for one in made:
        assert all(0 <= r.prefix_tokens <= r.input_tokens and r.prefix_tokens % 128 == 0 for r in one.rounds)
    with pytest.raises(ValueError, match="3 requests are not enough for 5 sessions"):
        codex_sessions(5, 3)


def test_codex_rounds_are_read_in_both_ways_as_recorded_ones() -> None:
    growth = codex_workload(Reading.GROWTH, 10, 300)
    prefix = codex_workload(Reading.PREFIX, 10, 300)
    kept = []
    for sessions in (growth, prefix):
        pairs = [two for s in sessions for two in pairwise(s.turns)]
        kept.append(sum(common(a.blocks, b.blocks) for a, b in pairs))
    assert kept[0] > kept[1]
    assert [s.name for s in growth] == [s.name for s in prefix]


def turn(*blocks: int) -> Turn:
    return Turn(64 * len(blocks) + 3, 1, blocks, 0.0, 0.0, 0.0)


def test_sessions_share_their_beginnings_and_nothing_else() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        sessions = []
        for name in "abc":
            ids = draw.sample(range(50), 20)
            turns = [turn(*ids[: draw.randint(1, 20)], *draw.sample(range(50, 60), 3)) for _ in range(4)]
            sessions.append(Session(name, 64, tuple(turns)))
        found = list(with_shared_prefix(sessions, 64 * 5 + 7))
        for before, after in zip(sessions, found, strict=True):
            assert after.shared_ids
            for i, one in enumerate(before.turns):
                for j, other in enumerate(before.turns):  # inside a session all is as it was
                    same = common(one.blocks, other.blocks)
                    assert common(after.turns[i].blocks, after.turns[j].blocks) == same
        firsts = [session.turns[0].blocks for session in found]
        for one, other in pairwise(firsts):
            assert common(one, other) == min(5, len(one), len(other))
        others = [
            {b for t in s.turns for b in t.blocks} - set(f[:5]) for s, f in zip(found, firsts, strict=True)
        ]
        assert not others[0] & others[1] and not others[1] & others[2]


def test_agents_share_a_prefix_of_their_own_unless_they_differ_in_one_session() -> None:
    def agents(*first: int) -> tuple[Agent, ...]:
        return tuple(Agent(f"x{one}", 0, 0.0, (turn(one, 7),)) for one in first)

    sessions = [Session("a", 64, (turn(1, 2),), agents(5)), Session("b", 64, (turn(3, 4),), agents(8, 9))]
    a, b = with_shared_prefix(sessions, 64, agent_tokens=64)
    assert a.turns[0].blocks[0] == b.turns[0].blocks[0]
    assert a.agents[0].turns[0].blocks[0] == b.agents[0].turns[0].blocks[0] != a.turns[0].blocks[0]
    assert b.agents[1].turns[0].blocks[0] != b.agents[0].turns[0].blocks[0]
    assert a.agents[0].turns[0].blocks[1] != b.agents[0].turns[0].blocks[1]


def test_prefixes_need_ids_of_ones_own_and_one_block_size() -> None:
    plain, other = Session("a", 64, (turn(1),)), Session("b", 16, (turn(1),))
    with pytest.raises(ValueError, match="a: its ids are shared already"):
        list(with_shared_prefix([replace(plain, shared_ids=True)], 64))
    with pytest.raises(ValueError, match="b: blocks of 16 tokens beside some of 64"):
        list(with_shared_prefix([plain, other], 64))
    with pytest.raises(ValueError, match="a prefix of -1 tokens is none"):
        list(with_shared_prefix([plain], -1))


def breaks(session: Session) -> list[tuple[int, int]]:
    """Pages that each turn keeps of the one before, and what that had, where it does not keep all."""
    found = []
    for before, turn in pairwise(session.turns):
        kept = common(before.blocks, turn.blocks)
        if kept < len(before.blocks):
            found.append((kept, len(before.blocks)))
    return found


def test_habits_shift_over_night_from_the_last_block_to_anywhere() -> None:
    made = adversarial_sessions(Adversarial(Kind.SHIFT))
    day = [one for session in made[:48] for one in breaks(session)]
    night = [one for session in made[48:] for one in breaks(session)]
    assert len(made) == 96 and {len(session.turns) for session in made} == {24}
    assert 180 < len(day) < 260 and 180 < len(night) < 260, "a fifth of 1,104 turns each"
    assert all(kept == length - 1 for kept, length in day)
    shares = sorted(kept / length for kept, length in night)
    assert abs(shares[len(shares) // 2] - 0.5) < 0.1 and shares[0] < 0.05 and shares[-1] > 0.95


def test_uniform_hits_part_anywhere_in_all_sessions() -> None:
    shares = [
        kept / length
        for session in adversarial_sessions(Adversarial(Kind.UNIFORM))
        for kept, length in breaks(session)
    ]
    assert 380 < len(shares) < 500
    for tenth in range(10):
        inside = sum(tenth / 10 <= share < (tenth + 1) / 10 for share in shares) / len(shares)
        assert 0.05 < inside < 0.15, tenth


def test_a_flood_sends_nothing_twice_beside_the_same_number_of_sessions() -> None:
    made = adversarial_sessions(Adversarial(Kind.FLOOD))
    flooding = [session for session in made if session.name.startswith("flooding")]
    assert (len(made), len(flooding)) == (98, 2) and made[:2] == flooding, "it is there from the start"
    for session in flooding:
        blocks = [block for turn in session.turns for block in turn.blocks]
        assert len(session.turns) == 240 and len(set(blocks)) == len(blocks)
        assert all(512 <= len(turn.blocks) <= 1536 for turn in session.turns)


@pytest.mark.parametrize("kind", Kind)
def test_adversarial_sessions_are_the_same_for_a_seed_and_differ_between_seeds(kind: Kind) -> None:
    what = Adversarial(kind, sessions=4, seed=1)
    assert adversarial_sessions(what) == adversarial_sessions(what)
    assert adversarial_sessions(what) != adversarial_sessions(replace(what, seed=2))
    assert what.name != replace(what, seed=2).name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sessions": 0}, "sessions 0 is not above 0"),
        ({"most_new": 3}, "most_new 3 is below least_new 4"),
        ({"pause_s": 0.0}, "pause_s 0.0 is no mean of pauses"),
        ({"rewrites": 1.5}, "rewrites 1.5 is no share"),
    ],
)
def test_adversarial_parameters_out_of_range_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Adversarial(Kind.SHIFT), **change)  # type: ignore[arg-type]
