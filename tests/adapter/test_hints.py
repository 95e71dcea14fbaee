"""Clients' hints: what is understood, what is ignored and counted, and what becomes of sessions and captures."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from eval.journal import replay
from sglang_histate.adapter.hints import MOST_PLACES, MOST_SESSIONS, NONE, Hint, Hints, Ignored, parse
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.retention import FORK_REQUESTS, MOST_KEPT, SLEEP_REQUESTS
from sglang_histate.policy.session_ends import MOST_SESSIONS as MOST_REMEMBERED

from .conftest import GPU
from .engine import PAGE, request, tokens
from .test_tier import ASSISTANT, STRUCTURE, USER, Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


def hints(**given: Any) -> dict[str, Any]:
    return {f"histate_{name}": value for name, value in given.items()}


def test_all_hints_of_a_request() -> None:
    found = parse(
        hints(
            checkpoint_at=[640, 128],
            checkpoint_before_last=2,
            keep_requests=50,
            done=True,
            session="planner",
            end_sessions=["a", "b", "a"],
            keep_sessions="c",
        )
    )
    assert found == Hints((640, 128), (2,), 50, True, "planner", ("a", "b"), ("c",))
    sleep, compact, fork = (parse(hints(about_to=what)) for what in ("sleep", "compact", {"fork": 64}))
    assert (sleep, compact, fork) == (Hints(sleep=True), Hints(compact=True), Hints(forks=64))
    assert {hint for one in (found, sleep, compact, fork) for hint in one.given} == set(Hint)


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
        (hints(session=7), [Ignored.WRONG_TYPE]),
        (hints(session=["a"]), [Ignored.WRONG_TYPE]),
        (hints(session=""), [Ignored.OUT_OF_RANGE]),
        (hints(session="x" * 129), [Ignored.OUT_OF_RANGE]),
        (
            hints(end_sessions=[None, {}, "", "x" * 129]),
            [Ignored.WRONG_TYPE] * 2 + [Ignored.OUT_OF_RANGE] * 2,
        ),
        (hints(keep_sessions=[f"s{i}" for i in range(99)]), [Ignored.TOO_MANY_SESSIONS]),
        (hints(about_to="nap"), [Ignored.OUT_OF_RANGE]),
        (hints(about_to=["sleep"]), [Ignored.WRONG_TYPE]),
        (hints(about_to={"fork": 2, "sleep": 1}), [Ignored.WRONG_TYPE]),
        (hints(about_to={"fork": "2"}), [Ignored.WRONG_TYPE]),
        (hints(about_to={"fork": 0}), [Ignored.OUT_OF_RANGE]),
        (hints(about_to={"fork": 65}), [Ignored.OUT_OF_RANGE]),
        (hints(about_to_sleep=True), [Ignored.UNKNOWN]),
    ],
)
def test_a_wrong_hint_is_ignored_with_a_reason(given: dict[str, Any], reasons: list[Ignored]) -> None:
    found = parse(given)
    assert list(found.ignored) == reasons
    assert len(found.checkpoint_at) <= MOST_PLACES and len(found.keep_sessions) <= MOST_SESSIONS
    assert set(found.given) <= {Hint.CHECKPOINT_AT, Hint.KEEP_SESSIONS}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
names = st.sampled_from(["histate_about_to", *(f"histate_{hint.value}" for hint in Hint)]) | st.text(
    max_size=12
)


@given(values | st.dictionaries(names | st.integers(), values, max_size=6))
def test_whatever_a_client_sends_is_no_error(custom_params: Any) -> None:
    found = parse(custom_params)
    named = (*found.end_sessions, *found.keep_sessions)
    assert all(isinstance(name, str) and 0 < len(name) <= 128 for name in named)
    assert isinstance(found.session, str) and 0 <= found.forks <= 64
    assert all(isinstance(at, int) and at > 0 for at in (*found.checkpoint_at, *found.before_last))
    assert found.keep_requests >= 0 and isinstance(found.done, bool)


def test_what_is_not_for_us_is_not_counted() -> None:
    assert parse({"thinking_budget": 5}) is NONE and parse(None) is NONE


@pytest.fixture
def rank():
    made = Rank(Alone(), kept_bytes=100_000)
    yield made
    made.store.close()


def asked(ids: array, salt: str | None = None, **given: Any) -> Any:
    req = request(ids, cache_salt=salt)
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
    assert rank.tier._hinted._kept._retention.bytes == 3 * 100 + 1024 * 64 + 100


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
    assert rank.tier._hinted._kept._retention.bytes == 0


def begin(rank: Rank, ids: array, **given: Any) -> Any:
    """A request that is taken up; what it computes is captured."""
    req = asked(ids, **given)
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    rank.prefill(req, req.prefix_len, len(ids))
    rank.drain()
    return req


def turn(rank: Rank, ids: array, *, answer: int = 0, **given: Any) -> Any:
    """A request with the prompt `ids`, whole pages, and so many tokens of its answer, from its beginning to its end."""
    req = begin(rank, ids, **given)
    state = state_of(req, PAGE)
    before = state.kv_covered
    req.output_ids = tokens((9, answer + 3))  # the last ones fill no page
    whole = ids + req.output_ids[:answer]
    rank.engine.insert(whole, state=float(len(whole)), cache_salt=req.cache_salt)
    rank.engine.settle()
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    state.kv_covered, req.kv.cache_protected_len = before, len(whole)
    rank.tier.published(req)
    rank.tier.finished(req)
    rank.drain()
    return req


def ranked(rank: Rank) -> list[list[int]]:
    """The sessions' first tokens, in the order in which their ends go from the device."""
    queue, first = rank.engine.ranking.device_kv, []
    by_id = {node.id: node for node in rank.engine.nodes()}
    for unit in queue.ranked():
        node = by_id[unit.nodes[0]] if unit.nodes else None
        while node is not None and node.parent.parent is not None:
            node = node.parent
        if node is not None:
            first.append(list(node.key.token_ids[:4]))
    return first


def head(seed: int) -> list[int]:
    return list(tokens((seed, 4)))


def ignored(rank: Rank) -> dict[Ignored, int]:
    return {reason: count for reason, count in rank.counters.hints_ignored.items() if count}


def test_any_later_request_can_end_a_session(rank: Rank) -> None:
    turn(rank, tokens((1, 512)))
    turn(rank, tokens((2, 512)), session="sub")
    turn(rank, tokens((2, 1024)), session="sub")
    begin(rank, tokens((7, 10)), end_sessions=["sub"])
    assert (
        ranked(rank)[0] == head(2)
        and rank.engine.ranking.device_kv.victim(lambda unit: True).last_access == 0
    )
    assert rank.counters.hints[Hint.END_SESSIONS] == 1 and not ignored(rank)
    begin(rank, tokens((7, 10)), end_sessions=["sub", "never heard of"])
    assert ignored(rank) == {Ignored.UNKNOWN_SESSION: 2}, "it is over"
    rank.check_idle()


def test_a_session_is_of_its_tenant(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), salt="one")
    turn(rank, tokens((2, 512)), salt="one", session="sub")
    before = rank.engine.ranking.device_kv.ranked()
    for salt in (None, "two"):
        begin(rank, tokens((7, 10)), salt=salt, end_sessions=["sub"], keep_sessions=["sub"])
    assert ignored(rank) == {Ignored.UNKNOWN_SESSION: 4}
    assert rank.engine.ranking.device_kv.ranked() == before
    begin(rank, tokens((7, 10)), salt="one", end_sessions=["sub"])
    assert ranked(rank)[0] == head(2)


def test_what_the_tree_has_lost_is_no_session(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), session="lost")
    rank.tier.reset()
    rank.engine.cache.reset()
    assert len(rank.tier._hinted._ends) == 0
    begin(rank, tokens((7, 10)), end_sessions=["lost"])
    turn(rank, tokens((2, 512)), session="lost")
    rank.engine.evict_kv(512)
    rank.engine.cache.evict_host(512)
    rank.store.clear()
    rank.drain()
    assert not rank.engine.nodes()
    begin(rank, tokens((7, 10)), end_sessions=["lost"], keep_sessions=["lost"])
    assert ignored(rank) == {Ignored.UNKNOWN_SESSION: 3}


def test_where_another_session_ended_is_not_ended_with_it(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), session="parent")
    turn(rank, tokens((1, 1024)), session="child")
    begin(rank, tokens((7, 10)), end_sessions=["child"])
    tree = rank.engine.ranking.tree
    last, first = sorted((node for node in rank.engine.nodes()), key=lambda node: -node.id)
    assert tree.last_used(last.id, 512) == 0 < tree.last_used(first.id, 512)
    turn(rank, tokens((1, 512)), session="other")
    begin(rank, tokens((7, 10)), end_sessions=["other"])
    assert tree.last_used(first.id, 512) > 0, "it brought nothing, and the parent ended there too"
    turn(rank, tokens((2, 512)), session="one")
    turn(rank, tokens((2, 512)), session="two")
    (end,) = [node for node in rank.engine.nodes() if not node.children and node is not last]
    begin(rank, tokens((7, 10)), end_sessions=["one"])
    assert tree.last_used(end.id, len(end.key)) > 0, "the second one ended there too"
    begin(rank, tokens((7, 10)), end_sessions=["two"])
    assert tree.last_used(end.id, len(end.key)) == 0


def test_any_later_request_can_keep_a_session(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), session="asleep")
    turn(rank, tokens((2, 512)))
    assert ranked(rank) == [head(1), head(2)]
    begin(rank, tokens((7, 10)), keep_sessions=["asleep"])
    assert ranked(rank) == [head(2), head(1)]
    latest = rank.engine.ranking.device_kv.ranked()[-1].last_access
    assert latest == rank.engine.ranking.clock + SLEEP_REQUESTS


def test_a_session_that_is_about_to_sleep_goes_last(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), about_to="sleep")
    turn(rank, tokens((2, 512)))
    assert ranked(rank) == [head(2), head(1)] and rank.counters.hints[Hint.SLEEP] == 1


def test_a_new_keep_of_a_session_replaces_the_former(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), session="me", keep_requests=800)
    turn(rank, tokens((2, 512)), session="me", keep_requests=5)
    assert rank.tier._hinted._kept._retention.bytes == 512 * 64 + 100
    assert ranked(rank) == [head(1), head(2)], "the former ranks by its use again"
    turn(rank, tokens((3, 512)), keep_requests=300)
    turn(rank, tokens((3, 1024)), session="me", keep_requests=800)
    assert ranked(rank)[0] == head(1) and ignored(rank) == {}
    turn(rank, tokens((4, 512)), session="me", keep_requests=10)
    unit = max(rank.engine.ranking.device_kv.ranked(), key=lambda unit: unit.last_access)
    assert unit.last_access < rank.engine.ranking.clock + 300, "what another one keeps there stays kept"


def test_more_is_asked_at_a_place_that_is_kept_already() -> None:
    """Asking for one request more must not make room for others while the first 500 still count."""
    rank = Rank(Alone(), kept_bytes=50_000)
    turn(rank, tokens((1, 512)), keep_requests=500)
    turn(rank, tokens((1, 512)), keep_requests=1)
    turn(rank, tokens((2, 512)), keep_requests=100)
    turn(rank, tokens((3, 512)), keep_requests=100)
    assert ignored(rank) == {Ignored.KEPT_ENOUGH: 2}
    rank.store.close()


def test_forks_are_expected_until_they_came(rank: Rank) -> None:
    ids = tokens((1, 512))
    turn(rank, ids, about_to={"fork": 2})
    turn(rank, tokens((2, 512)))
    assert ranked(rank) == [head(2), head(1)]
    latest = rank.engine.ranking.device_kv.ranked()[-1].last_access
    assert latest == rank.engine.ranking.clock - 1 + 2 * FORK_REQUESTS
    for seed in (21, 22):
        assert rank.tier._hinted._kept._retention.bytes > 0, "not all came"
        begin(rank, tokens((7, 200)))
        begin(rank, tokens((1, 256), (seed, 300)))
        begin(rank, ids + tokens((seed, 300)))
    assert rank.tier._hinted._kept._retention.bytes == 0
    turn(rank, tokens((2, 512), (4, 64)))
    assert ranked(rank) == [head(1), head(2)], "used last by the second fork"
    assert rank.counters.hints[Hint.FORK] == 1 and not ignored(rank)


def test_both_ends_that_forks_go_on_from_are_kept(rank: Rank) -> None:
    turn(rank, tokens((1, 512)), answer=256, about_to={"fork": 4}, keep_requests=70)
    until = rank.engine.ranking.clock + 70
    tree = rank.engine.ranking.tree
    (node,) = rank.engine.nodes()
    kept = {at for at, _ in tree.checkpoints(node.id)} & {512, 768}
    assert kept == {512, 768}
    units = rank.engine.ranking.device_kv.ranked() + list(rank.engine.ranking.ssd._queue.ranked())
    assert {unit.checkpoint[1]: unit.last_access for unit in units if unit.checkpoint[1] in kept} == {
        512: until,
        768: until,
    }
    assert rank.tier._hinted._kept._retention.bytes == 768 * 64 + 2 * 100


def test_forks_are_of_their_tenant(rank: Rank) -> None:
    ids = tokens((1, 512))
    turn(rank, ids, salt="one", about_to={"fork": 1})
    begin(rank, ids + tokens((2, 300)), salt="two")
    assert rank.tier._hinted._kept._retention.bytes > 0
    begin(rank, ids + tokens((2, 300)), salt="one")
    assert rank.tier._hinted._kept._retention.bytes == 0


def conversation(first: int, *, length: int = 704) -> array:
    """Five pages of system prompt, then a message."""
    return array("q", [*tokens((1, 5 * PAGE)), USER, *tokens((first, length - 5 * PAGE - 1))])


def test_a_session_that_is_about_to_compact_keeps_its_head_only(rank: Rank) -> None:
    ids = conversation(2)
    turn(rank, ids, answer=128, about_to="compact")
    keys, tree = PageKeys(PAGE, None, None), rank.engine.ranking.tree
    assert rank.store.lookup(keys.at(ids, 5 * PAGE)) is not None, "where the system prompt ends"
    (node,) = rank.engine.nodes()
    assert tree.last_used(node.id, 5 * PAGE) == rank.engine.ranking.clock
    assert tree.last_used(node.id, 5 * PAGE + 1) == 0
    assert rank.counters.output_ends == 0 and rank.counters.hints[Hint.COMPACT] == 1 and not ignored(rank)
    turn(rank, tokens((8, 512)))
    assert ranked(rank)[0] == head(1)
    again = begin(rank, conversation(3))
    assert state_of(again, PAGE).kv_covered == 5 * PAGE
    rank.check_idle()


def test_a_name_gets_its_session_a_checkpoint_for_the_day_of_compaction(rank: Rank) -> None:
    ids = conversation(2)
    assert 5 * PAGE not in state_of(begin(Rank(Alone()), ids), PAGE).plan
    req = turn(rank, ids, session="long")
    assert 5 * PAGE in state_of(req, PAGE).plan
    longer = ids + tokens((5, 512))
    turn(rank, longer, session="long", keep_requests=50)
    turn(rank, longer + tokens((6, 320)), session="long", about_to="compact")
    assert not ignored(rank) and rank.tier._hinted._kept._retention.bytes == 0
    tree = rank.engine.ranking.tree
    used = [tree.last_used(node.id, len(node.key)) for node in rank.engine.nodes()]
    assert used == [0] * len(used), "no node ends with the head"
    top = min(rank.engine.nodes(), key=lambda node: node.id)
    assert tree.last_used(top.id, 5 * PAGE) > 0
    begin(rank, tokens((7, 10)), end_sessions=["long"])
    assert ignored(rank) == {Ignored.UNKNOWN_SESSION: 1}, "nothing of it is left"


def test_a_head_that_is_cached_without_a_checkpoint_is_not_computed_for_one(rank: Rank) -> None:
    ids = conversation(2)
    turn(rank, ids)
    turn(rank, ids + tokens((5, 320)), about_to="compact")
    assert ignored(rank) == {Ignored.NOT_COMPUTED: 1}


def test_compaction_needs_to_know_where_messages_begin() -> None:
    for structure, ids in ((None, conversation(2)), (STRUCTURE, tokens((1, 704)))):
        rank = Rank(Alone(), structure=structure)
        turn(rank, ids, answer=128, about_to="compact")
        turn(rank, tokens((8, 512)))
        assert ignored(rank) == {Ignored.NO_TEMPLATE: 1}
        assert rank.engine.ranking.device_kv.victim(lambda unit: True).last_access > 0
        assert rank.counters.output_ends == 1
        rank.store.close()


def test_what_hints_do_is_in_the_policy_log() -> None:
    events: list = []
    rank = Rank(Alone(), journal=Journal(lambda event: events.append(json.loads(json.dumps(event)))))
    turn(rank, conversation(2), session="a", about_to="compact")
    turn(rank, tokens((3, 512)), session="b", keep_requests=500)
    turn(rank, tokens((4, 512)), session="b", about_to={"fork": 1})
    turn(rank, tokens((5, 512)), session="c")
    begin(rank, tokens((4, 512)) + tokens((6, 20)), end_sessions=["c"])
    rank.engine.evict_states(1)
    rank.engine.evict_kv(1024)
    rank.drain()
    assert {event[2] for event in events if event[0] == "forsake"} == {0, 5 * PAGE}
    assert replay(events).different == [] and replay(events).victims > 2
    without = [event for event in events if event[0] not in ("keep", "forsake")]
    assert replay(without).different, "they decided something"
    rank.store.close()


def test_the_docs_name_every_hint_and_reason() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page, metrics = (docs / "hints.md").read_text(), (docs / "metrics.md").read_text()
    assert all(f"`{reason.value}`" in page for reason in Ignored)
    assert all(f"`{hint.value}`" in metrics for hint in Hint)
    words = {hint.value for hint in Hint if not hint.value.startswith("about_to")} | {"about_to"}
    assert all(f"`histate_{word}`" in page for word in words)
    numbers = f"for {SLEEP_REQUESTS} requests", f"for {FORK_REQUESTS} requests each", f"{MOST_KEPT} at most"
    assert all(number in page for number in (*numbers, f"last {MOST_REMEMBERED:,} sessions"))
