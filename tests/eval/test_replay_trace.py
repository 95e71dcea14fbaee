"""A replay saved as a trace sends what the replay sends, page for page and pause for pause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from trace_files import SHARED

from eval.replay.options import parse
from eval.replay.requests import PAGE, Shape, build
from eval.replay.rounds import prepare
from eval.replay.trace import as_sent
from eval.workloads import weka
from eval.workloads.save import saved
from eval.workloads.scaling import Scaling
from eval.workloads.sessions import Agent, Session, Turn, common


def turns(rng: random.Random, count: int, ids: range) -> tuple[Turn, ...]:
    """Prompts that mostly extend the one before."""
    found: list[Turn] = []
    blocks: tuple[int, ...] = ()
    for _ in range(count):
        kept = blocks[: rng.randint(0, len(blocks))] if rng.random() < 0.2 else blocks
        blocks = kept + tuple(rng.choice(ids) for _ in range(rng.randint(1, 90)))
        tokens = 64 * len(blocks) + rng.randint(0, 63)
        found.append(Turn(tokens, rng.randint(0, 900), blocks, 0.0, rng.uniform(0, 99), rng.uniform(0, 9)))
    return tuple(found)


def sessions(seed: int, shared: bool) -> list[Session]:
    rng = random.Random(seed)
    agents = [Agent("a", 0, 2.0, turns(rng, 2, range(4))), Agent("b", 2, 80.0, turns(rng, 3, range(4)))]
    return [
        Session(f"s{number}", 64, turns(rng, 4, range(4)), tuple(agents[: number % 3]), shared_ids=shared)
        for number in range(5)
    ]


def lists(session: Session) -> list[Sequence[Turn]]:
    return [session.turns, *(agent.turns for agent in session.agents)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens_per_block", [4, 16, 64, 128])
def test_prompts_are_alike_in_as_many_pages(seed: int, tokens_per_block: int) -> None:
    recorded = sessions(seed, shared=bool(seed % 2))
    scaling = Scaling(tokens_per_block, 256, PAGE)
    prompts = [scaling.prompt(one, turn).tokens for one in recorded for many in lists(one) for turn in many]
    sent = list(as_sent(recorded, Shape(tokens_per_block)))
    made = [turn for one in sent for many in lists(one) for turn in many]
    assert [turn.input_tokens for turn in made] == [len(prompt) for prompt in prompts]
    assert all(len(turn.blocks) == turn.input_tokens // PAGE for turn in made)
    for here, turn in zip(prompts, made, strict=True):
        for there, other in zip(prompts, made, strict=True):
            assert common(turn.blocks, other.blocks) == common(here, there) // PAGE


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_again_is_sent_in_the_same_way(seed: int, tmp_path: Path) -> None:
    recorded = sessions(seed, shared=False)
    shape = Shape(4, most_output=20, longest_gap_s=30.0, time_scale=0.25)
    list(saved(as_sent(recorded, shape), tmp_path / "trace"))
    before = build(recorded, shape)
    after = build(list(weka.read_sessions(tmp_path / "trace")), Shape(PAGE))
    for first, second in zip(before, after, strict=True):
        assert [agent.delay_s for agent in second.agents] == pytest.approx(
            [agent.delay_s for agent in first.agents], abs=1e-6
        )
        for one, again in zip(first.all_requests(), second.all_requests(), strict=True):
            assert (one.key, one.gap_s) == (again.key, again.gap_s)
            assert (len(one.prompt), len(one.output)) == (len(again.prompt), len(again.output))


def test_times_follow_each_other_and_a_parent_waits() -> None:
    def turn(gap_s: float) -> Turn:
        return Turn(640, 64, tuple(range(10)), 99.0, gap_s, 2.0)

    agent = Agent("a", 0, 8.0, (turn(99.0), turn(4.0)))
    whole = Session("s", 64, (turn(5.0), turn(6.0), turn(100.0)), (agent,), start_s=3.0)
    (sent,) = as_sent([whole], Shape(32, longest_gap_s=60.0))
    assert (sent.block_tokens, sent.start_s) == (64, 0.0)
    # Everything takes half: service 1, pauses 3 and 30, the agent starts 4 after the first answer and takes 4.
    assert [(one.start_s, one.gap_s, one.service_s) for one in sent.agents[0].turns] == [(5, 0, 1), (8, 2, 1)]
    assert [(one.start_s, one.gap_s) for one in sent.turns] == [(0, 0), (9, 3), (40, 30)]
    assert sent.turns[0].output_tokens == 32


@pytest.mark.skipif(not SHARED.exists(), reason="no recorded traces beside the repository")
def test_the_command_saves_what_it_sends(tmp_path: Path) -> None:
    given = ["--workload", str(SHARED / "weka_cc/samples"), "--turns", "5", "--url", "http://nowhere/v1"]
    options = parse([*given, "--out", str(tmp_path / "out"), "--save-trace", str(tmp_path / "trace")])
    before = prepare(options)
    again = ["--workload", str(tmp_path / "trace"), "--tokens-per-block", "64", *given[-2:]]
    after = prepare(parse([*again, "--out", str(tmp_path / "out")]))
    assert [len(one.requests) for one in after.sessions] == [len(one.requests) for one in before.sessions]
    assert before.text().split(":")[0] == after.text().split(":")[0]
    with pytest.raises(ValueError, match="has sessions already"):
        prepare(options)
