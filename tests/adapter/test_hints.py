"""Clients' hints: what is understood, what is ignored and counted, and what becomes of sessions and captures."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_histate.adapter.hints import MOST_PLACES, NONE, Hint, Hints, Ignored, parse
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of

from .conftest import GPU
from .engine import PAGE, request, tokens
from .test_tier import ASSISTANT, USER, Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


def hints(**given: Any) -> dict[str, Any]:
    return {f"histate_{name}": value for name, value in given.items()}


def test_all_hints_of_a_request() -> None:
    found = parse(hints(checkpoint_at=[640, 128], checkpoint_before_last=2, keep_requests=50, done=True))
    assert found == Hints((640, 128), (2,), 50, True)
    assert set(found.given) == set(Hint)


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (hints(nap=1), [Ignored.UNKNOWN]),
        (hints(checkpoint_at="12"), [Ignored.WRONG_TYPE]),
        (hints(checkpoint_at=[True, 1.5, None, {}]), [Ignored.WRONG_TYPE] * 4),
        (hints(checkpoint_before_last=[0, -3]), [Ignored.OUT_OF_RANGE] * 2),
        (hints(checkpoint_at=list(range(1, 100))), [Ignored.TOO_MANY]),
        (hints(keep_requests=[1, 2]), [Ignored.WRONG_TYPE]),
        (hints(keep_requests=-1), [Ignored.OUT_OF_RANGE]),
        (hints(done="yes"), [Ignored.WRONG_TYPE]),
    ],
)
def test_a_wrong_hint_is_ignored_with_a_reason(given: dict[str, Any], reasons: list[Ignored]) -> None:
    found = parse(given)
    assert list(found.ignored) == reasons
    assert len(found.checkpoint_at) <= MOST_PLACES and not (found.keep_requests or found.done)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
names = st.sampled_from([f"histate_{hint.value}" for hint in Hint]) | st.text(max_size=12)


@given(values | st.dictionaries(names | st.integers(), values, max_size=6))
def test_whatever_a_client_sends_is_no_error(custom_params: Any) -> None:
    found = parse(custom_params)
    assert all(isinstance(at, int) and at > 0 for at in (*found.checkpoint_at, *found.before_last))
    assert found.keep_requests >= 0 and isinstance(found.done, bool)


def test_what_is_not_for_us_is_not_counted() -> None:
    assert parse({"thinking_budget": 5}) is NONE and parse(None) is NONE


@pytest.fixture
def rank():
    made = Rank(Alone(), kept_bytes=100_000)
    yield made
    made.store.close()


def asked(ids: array, **given: Any) -> Any:
    req = request(ids)
    req.sampling_params.custom_params = hints(**given)
    return req


def captured(rank: Rank, req: Any) -> list[int]:
    req.prefix_len, req.extend_end = 0, len(req.full_untruncated_fill_ids)
    capture = rank.tier._planner.plan_batch([req])
    positions = [row.position for row in capture.rows]
    for row in capture.rows:
        rank.store.release_record(row.record)
    return positions


def test_a_checkpoint_where_the_client_wants_one(rank: Rank) -> None:
    ids = tokens((1, 700))
    without = captured(rank, asked(ids))
    found = captured(rank, asked(ids, checkpoint_at=[200, 5000]))
    assert set(found) - set(without) == {192}
    assert rank.counters.hints[Hint.CHECKPOINT_AT] == 1
    assert rank.counters.hints_ignored[Ignored.OUT_OF_RANGE] == 1


def test_a_checkpoint_before_one_of_the_last_messages(rank: Rank) -> None:
    ids = array(
        "q", [USER, *tokens((1, 199)), ASSISTANT, *tokens((2, 199)), USER, *tokens((3, 299)), ASSISTANT, 5]
    )
    without = captured(rank, asked(ids))
    found = captured(rank, asked(ids, checkpoint_before_last=[1, 2, 9]))
    assert set(found) - set(without) == {384, 192}
    assert rank.counters.hints_ignored[Ignored.OUT_OF_RANGE] == 1


def test_hints_of_a_request_count_once_however_often_it_is_planned(rank: Rank) -> None:
    req = asked(tokens((1, 700)), checkpoint_at=[200, 9999], nap=1)
    for _ in range(3):
        captured(rank, req)
    assert rank.counters.hints[Hint.CHECKPOINT_AT] == 1
    assert (
        rank.counters.hints_ignored[Ignored.OUT_OF_RANGE] == rank.counters.hints_ignored[Ignored.UNKNOWN] == 1
    )


def ended(rank: Rank, seed: int, **given: Any) -> array:
    """A session of 512 tokens that has finished."""
    ids = tokens((seed, 512))
    req = finished(rank, ids)
    state_of(req, PAGE).kv_covered = 0  # when it came
    req.sampling_params.custom_params = hints(**given)
    rank.engine.ranking.clock += 1
    rank.tier.published(req)
    rank.tier.finished(req)
    rank.drain()
    return ids


def first_victim(rank: Rank) -> int:
    """The seed's first page tells which session goes first from the device."""
    unit = rank.engine.ranking.device_kv.victim(lambda unit: True)
    (node,) = [node for node in rank.engine.nodes() if node.id == unit.nodes[0]]
    return list(node.key.token_ids[:4])


def test_a_session_that_is_over_goes_first_and_is_not_written(rank: Rank) -> None:
    ended(rank, 1)
    over = ended(rank, 2, done=True)
    assert first_victim(rank) == list(over[:4])
    assert rank.store.lookup(PageKeys(PAGE, None, None).at(over, 512)) is None
    assert rank.counters.output_ends == 1 and rank.counters.hints[Hint.DONE] == 1
    rank.check_idle()


def test_a_request_that_added_nothing_does_not_end_another_session(rank: Rank) -> None:
    ids = ended(rank, 1)
    ended(rank, 2)
    req = request(ids + tokens((9, 3)))
    req.sampling_params.custom_params = hints(done=True)
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    req.kv.cache_protected_len = 512
    state_of(req, PAGE).kv_covered = 512
    rank.tier.finished(req)
    unit = rank.engine.ranking.device_kv.victim(lambda unit: True)
    assert unit.last_access > 0, "both sessions were used"


def test_an_aborted_request_ends_nothing(rank: Rank) -> None:
    ids = tokens((3, 512))
    req = finished(rank, ids)
    req.sampling_params.custom_params = hints(done=True)
    req.finished_reason = FINISH_ABORT("gone")
    rank.tier.published(req)
    rank.tier.finished(req)
    rank.drain()
    assert rank.store.lookup(PageKeys(PAGE, None, None).at(ids, 512)) is not None
    assert rank.engine.ranking.device_kv.victim(lambda unit: True).last_access == rank.engine.ranking.clock


def test_a_session_that_is_kept_in_each_turn_pays_for_each_checkpoint(rank: Rank) -> None:
    ids = tokens((1, 256))
    for turn in range(1, 5):
        ids = tokens((1, 256 * turn))
        req = finished(rank, ids)
        req.sampling_params.custom_params = hints(keep_requests=100)
        rank.tier.published(req)
        rank.tier.finished(req)
        rank.drain()
    assert rank.tier._hinted._retention.bytes == 3 * 100 + 1024 * 64 + 100


def test_a_session_to_keep_goes_last(rank: Rank) -> None:
    ended(rank, 1, keep_requests=100)
    later = ended(rank, 2)
    assert first_victim(rank) == list(later[:4])


def test_more_than_the_share_is_not_kept_and_said_so(rank: Rank) -> None:
    for seed in range(1, 5):
        ended(rank, seed, keep_requests=100)
    assert rank.counters.hints_ignored[Ignored.KEPT_ENOUGH] == 1, "each takes 512 x 64 + 100 bytes of 100,000"
    rank.tier.reset()
    rank.engine.cache.reset()
    assert rank.tier._hinted._retention.bytes == 0
