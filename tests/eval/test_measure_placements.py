"""Where each placement resumes, against a count that compares every prompt with every earlier one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from trace_files import SHARED

from eval.measure.paths import Tree, in_order, page_keys, page_tokens
from eval.measure.placements import Outcome, Placement, outcomes
from eval.workloads.load import read
from eval.workloads.select import select
from eval.workloads.sessions import Agent, Session, Turn, common
from sglang_histate.policy.interval import parse_interval

ADAPTIVE = parse_interval("adaptive")
NONE = parse_interval("none")
STATE_TOKENS = 1572.0


def turn(at: float, blocks: list[int], block: int = 64, rest: int = 1) -> Turn:
    return Turn(len(blocks) * block + rest, 4, tuple(blocks), at, 0.0, 0.0)


def run(sessions: list[Session], interval=ADAPTIVE) -> list[Outcome]:
    return list(outcomes(sessions, interval, STATE_TOKENS))


def random_sessions(seed: int, block: int, shared: bool) -> list[Session]:
    """Sessions that append, roll back, repeat and, with shared ids, begin like others."""
    draw = random.Random(seed)
    fresh = 1000
    sessions = []
    for name in range(draw.randint(1, 4)):
        blocks = list(range(draw.randint(0, 8)))
        turns = []
        for index in range(draw.randint(1, 12)):
            if draw.random() < 0.3:
                blocks = blocks[: draw.randint(0, len(blocks))]
            new = draw.choice((0, 1, 3, 40, 400))
            blocks = blocks + list(range(fresh, fresh + new))
            fresh += new
            rest = draw.randint(0 if blocks else 1, block - 1)
            turns.append(turn(10.0 * index + name, blocks, block, rest))
        sessions.append(Session(f"s{name}", block, tuple(turns), shared_ids=shared))
    return sessions


@dataclass
class Slow:
    """Everything as lists of prefixes: no tree, no numbers."""

    page: int

    def __post_init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.kept: dict[Placement, set[tuple[int, ...]]] = {
            way: set() for way in Placement if way is not Placement.EVERY_PAGE
        }

    def serve(self, prompt: int, blocks: tuple[int, ...], block: int) -> tuple[int, dict[Placement, int]]:
        each = self.page // block
        whole = len(blocks) // each
        match = max((common(one, blocks) // each for one in self.prompts), default=0)
        match = min(match, (prompt - 1) // self.page)
        restored = {Placement.EVERY_PAGE: match * self.page}
        for way, kept in self.kept.items():
            fits = [pages for pages in range(1, match + 1) if blocks[: pages * each] in kept]
            restored[way] = max(fits, default=0) * self.page
            take = {whole}
            if way is not Placement.TURN_ENDS:
                take.add(match)
            if way is Placement.HISTATE:
                start = restored[way]
                interval = ADAPTIVE.choose(prompt - start, STATE_TOKENS)
                take.add((prompt - 1) // self.page)
                if interval:
                    take |= {at // self.page for at in range(start + interval, prompt, interval)}
                take = {pages for pages in take if pages}
            kept |= {blocks[: pages * each] for pages in take if pages}
        self.prompts.append(blocks)
        return match * self.page, restored


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("shared", [True, False])
def test_every_request_resumes_where_the_slow_count_says(block: int, shared: bool) -> None:
    internal = 0
    for seed in range(25):
        sessions = random_sessions(seed, block, shared)
        found = iter(run(sessions))
        slow: dict[str, Slow] = {}
        for sent in in_order(sessions):
            whose = slow.setdefault("" if shared else sent.session.name, Slow(max(block, 64)))
            match, restored = whose.serve(sent.turn.input_tokens, sent.turn.blocks, block)
            one = next(found)
            assert (one.session, one.prompt) == (sent.session.name, sent.turn.input_tokens)
            assert (one.match, one.restored) == (match, restored)
            assert one.internal == (match > restored[Placement.TURN_ENDS])
            internal += one.internal
        assert next(found, None) is None
    assert internal > 20  # the sessions are such that the answer matters


def test_denser_placements_never_resume_earlier() -> None:
    order = [Placement.TURN_ENDS, Placement.BRANCH_POINTS, Placement.HISTATE, Placement.EVERY_PAGE]
    for seed in range(25):
        for one in run(random_sessions(seed, 64, True)):
            resumed = [one.restored[way] for way in order]
            assert resumed == sorted(resumed) and resumed[-1] == one.match < one.prompt
            assert all(one.computed(way) >= one.again(way) >= 0 for way in order)


def test_a_rewrite_inside_a_long_turn_is_an_internal_hit_that_an_interval_shortens() -> None:
    long, cut = list(range(1000)), [*range(600), *range(5000, 5100)]
    sessions = [Session("s", 64, (turn(0, long), turn(1, cut), turn(2, [*range(600), 7777])))]
    first, second, third = run(sessions)
    assert first.restored == dict.fromkeys(Placement, 0) and not first.internal
    assert second.internal and second.match == 600 * 64 and second.turn_end == 1000 * 64
    assert second.restored[Placement.TURN_ENDS] == second.restored[Placement.BRANCH_POINTS] == 0
    interval = ADAPTIVE.choose(64_001, STATE_TOKENS)
    assert 600 * 64 - interval < second.restored[Placement.HISTATE] <= 600 * 64
    assert third.restored[Placement.BRANCH_POINTS] == third.match == 600 * 64  # the second one passed there
    assert third.restored[Placement.TURN_ENDS] == 0
    assert run(sessions, NONE)[1].restored[Placement.HISTATE] == 0


def test_a_repeated_prompt_computes_its_last_token() -> None:
    exact, more = turn(0, [1, 2, 3], rest=0), turn(1, [1, 2, 3], rest=0)
    _, again = run([Session("s", 64, (exact, more))])
    assert again.match == 128 and again.restored[Placement.HISTATE] == 128
    assert again.restored[Placement.TURN_ENDS] == 0


def test_ids_of_ones_own_match_nothing_elsewhere_and_agents_match_their_session() -> None:
    agent = Agent("x", 0, 0.0, (turn(5, [1, 2, 3, 4]),))
    local = [Session(name, 64, (turn(0, [1, 2, 3]),), (agent,)) for name in "ab"]
    assert [one.match for one in run(local)] == [0, 192, 0, 192]
    shared = [Session(name, 64, (turn(0, [1, 2, 3]),), shared_ids=True) for name in "ab"]
    assert [one.match for one in run(shared)] == [0, 192]


def test_shared_requests_come_by_the_files_clock() -> None:
    a = Session("a", 64, (turn(0, [1]), turn(10, [2])), shared_ids=True, start_s=5.0)
    b = Session("b", 64, (turn(0, [3]), turn(3, [4])), shared_ids=True)
    own = Session("c", 64, (turn(0, [9]),))
    assert [(s.session.name, s.anew) for s in in_order([a, own, b])] == [
        ("c", True), ("b", True), ("b", False), ("a", False), ("a", False),
    ]  # fmt: skip


def test_pages_are_whole_in_blocks_and_in_server_pages() -> None:
    sizes = {16: 64, 64: 64, 512: 512, 48: 192}
    assert {block: page_tokens(Session("s", block, ())) for block in sizes} == sizes
    keys = list(page_keys(Session("s", 16, ()), turn(0, list(range(11)), 16)))
    assert keys == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_sessions_that_share_ids_have_one_block_size() -> None:
    mixed = [
        Session("a", 64, (turn(0, [1]),), shared_ids=True),
        Session("b", 512, (turn(1, [1], 512),), shared_ids=True),
    ]
    with pytest.raises(ValueError, match="b: blocks of 512 tokens share ids with others"):
        run(mixed)


def test_a_tree_counts_what_it_knows() -> None:
    tree = Tree()
    assert tree.add("abc") == ([0, 1, 2], 0, False)
    assert tree.add("abd") == ([0, 1, 3], 2, False)
    assert tree.add("b") == ([4], 0, False)
    assert list(tree.turn_end) == [3, 3, 3, 3, 1] and len(tree) == 5
    assert tree.add("abcd") == ([0, 1, 2, 5], 3, True)
    assert tree.add("abce") == ([0, 1, 2, 6], 3, False)
    assert tree.add("abce") == ([0, 1, 2, 6], 4, True)


@pytest.mark.skipif(not SHARED.exists(), reason="no recorded traces beside the repository")
def test_recorded_chats_have_the_reuse_that_their_readme_states() -> None:
    """An infinite cache of blocks hits 64.0 % of the blocks of Mooncake's synthetic trace."""
    blocks: set[tuple[int, ...] | int] = set()
    hit = total = 0
    sessions = list(read(SHARED / "mooncake_fast25/synthetic_trace.jsonl"))
    for one in run(sessions):
        hit += one.match // one.page
    for session in sessions:
        total += sum(-(-turn.input_tokens // 512) for turn in session.turns)
        blocks.update(block for turn in session.turns for block in turn.blocks)
    assert 100 * hit / total == pytest.approx(64.0, abs=1.5)
    samples = run(list(select(read(SHARED / "weka_cc/samples"), "context:131072")))
    assert len(samples) > 20 and any(one.internal for one in samples)
