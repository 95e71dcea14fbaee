"""Steps that keep their last tokens for prompts that end with them, by SGLang's own admission."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from .conftest import GPU
from .engine import Engine, build, request, tokens

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

STEP, TAIL = 640, 128


@pytest.fixture
def engine() -> Engine:
    engine = build()
    engine.cache.step_tail = TAIL
    return engine


def adder(engine: Engine, step: int = STEP) -> Any:
    return PrefillAdder(64, engine.cache, engine.kv, None, 1.0, 1 << 20, step)


def arrive(engine: Engine, length: int, seed: int) -> Any:
    req = request(tokens((seed, length)))
    req.init_next_round_input(engine.cache)
    return req


def admit(adding: Any, req: Any) -> tuple[Any, int]:
    """Offer a request to a step; return what SGLang says of the next one and how many of its tokens are computed."""
    said = adding.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    return said, (req.extend_end - req.prefix_len if req in adding.can_run_list else 0)


@pytest.mark.parametrize(
    ("length", "computed"),
    [
        (STEP - TAIL, STEP - TAIL),
        (STEP - TAIL + 1, STEP - TAIL + 1),  # the end may take of the tail
        (STEP, STEP),
        (STEP + 1, STEP - TAIL),  # it goes on: the tail is not for it
        (2000, STEP - TAIL),
    ],
)
def test_a_prompt_alone(engine: Engine, length: int, computed: int) -> None:
    assert admit(adder(engine), arrive(engine, length, 1))[1] == computed


def test_one_end_takes_the_tail_and_then_the_step_is_full(engine: Engine) -> None:
    adding = adder(engine)
    assert admit(adding, arrive(engine, 300, 1)) == (AddReqResult.CONTINUE, 300)
    assert admit(adding, arrive(engine, 300, 2)) == (AddReqResult.OTHER, 300)
    assert admit(adding, arrive(engine, 64, 3)) == (AddReqResult.OTHER, 0)


def test_a_prompt_that_began_in_an_earlier_step_ends_in_the_tail(engine: Engine) -> None:
    req = arrive(engine, STEP - TAIL + STEP, 1)
    first = adder(engine)
    assert admit(first, req)[1] == STEP - TAIL and first.new_chunked_req is req
    req.prefix_len = req.extend_end
    second = adder(engine)
    assert second.add_chunked_req(req) is None, "it ends here"
    assert req.extend_end - req.prefix_len == STEP
    assert second.budget_state() is AddReqResult.OTHER, "nothing is left of this step"


def test_without_a_tail_every_token_is_for_any_prompt(engine: Engine) -> None:
    engine.cache.step_tail = 0
    assert admit(adder(engine), arrive(engine, STEP, 1))[1] == STEP
    assert admit(adder(engine), arrive(engine, STEP + 1, 2))[1] == STEP


def test_unchunked_prefill_has_no_steps(engine: Engine) -> None:
    assert (
        admit(PrefillAdder(64, engine.cache, engine.kv, None, 1.0, 1 << 20, None), arrive(engine, 900, 1))[1]
        == 900
    )
