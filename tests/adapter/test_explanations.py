"""What is said about a request: where its prompt departs from earlier ones, what it got, and who may hear of it."""

from __future__ import annotations

import json
import logging
from array import array
from typing import Any

import numpy as np
import pytest

from sglang_histate.adapter import explain_routes, hooks, purge
from sglang_histate.adapter.explanations import Explanations, warning
from sglang_histate.adapter.hit_series import STEP_S, STEPS, HitSeries
from sglang_histate.adapter.prefix_break import SHORT_TOKENS, alike_after
from sglang_histate.policy.standing_break import TIMES, StandingBreak
from sglang_histate.policy.structure import Marker, Part, Structure

from .conftest import GPU
from .engine import PAGE, request, tokens
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

SYSTEM, USER, ASSISTANT, THINK = 60_000, 60_001, 60_002, 60_003
STRUCTURE = Structure(
    [
        Marker((SYSTEM,), Part.SYSTEM),
        Marker((USER,), Part.USER),
        Marker((ASSISTANT,), Part.ASSISTANT),
        Marker((THINK,), Part.THINKING, frozenset({Part.ASSISTANT})),
    ]
)


@pytest.fixture
def rank():
    made = Rank(Alone())
    made.engine.cache.explanations = Explanations(
        made.engine.cache.tree_core,
        page_size=PAGE,
        requests=8,
        structure=STRUCTURE,
        structure_note="on",
        clock=lambda: 1000.0,
    )
    yield made
    made.store.close()


def prompt(*parts: Any) -> array:
    """Ids: each part is a marker or (seed, count)."""
    ids = array("q")
    for part in parts:
        ids.extend([part] if isinstance(part, int) else tokens(part))
    return ids


def admit(rank: Rank, ids: array, rid: str, **changes: Any) -> Any:
    req = request(ids, **changes)
    req.rid = rid
    assert rank.engine.cache.request_ready(req)
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    rank.prefill(req, req.prefix_len, len(ids))
    return req


def explained(rank: Rank, rid: str) -> dict[str, Any]:
    found = rank.engine.cache.explanations.explain(rid)
    assert found is not None
    return found


def test_a_rewrite_names_the_place_and_the_request(rank) -> None:
    first = prompt(SYSTEM, (1, 200), USER, (2, 100), ASSISTANT, (3, 100), USER, (4, 50))
    admit(rank, first, "first")
    second = prompt(SYSTEM, (1, 200), USER, (2, 100), ASSISTANT, (3, 40), (9, 200), USER, (4, 50))
    req = admit(rank, second, "second")
    assert explained(rank, "first")["prefix_break"] is None
    position = 1 + 200 + 1 + 100 + 1 + 40
    found = explained(rank, "second")
    assert found["prefix_break"] == {
        "position": position, "place": "assistant turn 1", "before": "assistant turn 1", "against": "first",
        "alike_after": 0,
    }  # fmt: skip
    details = hooks.add_cached_details(req, None)
    assert (
        details["prefix_break"] == position // PAGE * PAGE
        and details["prefix_break_place"] == "assistant turn 1"
    )
    assert (details["device"], details["host"], details["ssd"], details["checkpoint"]) == (0, 0, 0, 0)
    assert all(type(value) in (int, str) for value in details.values()), "SGLang sends nothing else on"


def test_thinking_that_was_dropped(rank) -> None:
    before = prompt(SYSTEM, (1, 100), USER, (2, 20), ASSISTANT, THINK, (3, 100))
    admit(rank, before, "before")
    admit(rank, prompt(SYSTEM, (1, 100), USER, (2, 20), ASSISTANT, (5, 30), USER, (6, 9)), "after")
    found = explained(rank, "after")["prefix_break"]
    assert (found["position"], found["place"]) == (123, "assistant turn 1")
    assert found["before"] == "thinking of assistant turn 1"


def test_an_output_is_part_of_what_the_next_prompt_may_continue(rank) -> None:
    ids = prompt(USER, (1, 100))
    req = admit(rank, ids, "asked")
    req.output_ids = array("q", [7, 8, 9])
    req.full_untruncated_fill_ids = ids + req.output_ids
    req.last_node = rank.engine.cache.tree_core.root_node.id
    rank.engine.cache.explanations.finished(req)
    assert explained(rank, "asked")["output_tokens"] == 3
    admit(rank, ids + array("q", [7, 8, 9]) + prompt(USER, (2, 20)), "goes on")
    assert explained(rank, "goes on")["prefix_break"] is None
    admit(rank, ids + array("q", [7, 5, 9]) + prompt(USER, (2, 20)), "edited")
    assert explained(rank, "edited")["prefix_break"]["position"] == len(ids) + 1


def test_a_path_of_the_tree_whose_request_is_forgotten(rank) -> None:
    ids = prompt(SYSTEM, (1, 299), USER, (2, 339))
    rank.engine.insert(ids)
    admit(rank, ids[:420] + prompt(USER, (3, 80)), "late")
    found = explained(rank, "late")["prefix_break"]
    assert (found["position"], found["place"], found["before"]) == (420, "user turn 2", "user turn 1")
    assert found["against"] is None
    # A node of its own for each of two branches, and the one that goes along further counts.
    rank.engine.insert(ids[:384] + tokens((5, 128)))
    admit(rank, ids[:384] + tokens((5, 20)) + tokens((6, 100)), "branch")
    assert explained(rank, "branch")["prefix_break"]["position"] == 404


def test_a_prompt_whose_kv_is_gone_is_still_compared(rank) -> None:
    ids = prompt(USER, (1, 500))
    admit(rank, ids, "gone")  # nothing of it was put into the tree
    admit(rank, ids[:300] + tokens((2, 50)), "rewrite")
    found = explained(rank, "rewrite")
    assert found["kv_found"] == 0 and found["prefix_break"]["position"] == 300


def test_tenants_are_never_compared(rank) -> None:
    ids = prompt(USER, (1, 500))
    admit(rank, ids, "a", extra_key="a")
    admit(rank, ids[:300] + tokens((2, 50)), "b", extra_key="b")
    assert explained(rank, "b")["prefix_break"] is None


def test_what_a_request_resumed_from(rank) -> None:
    ids = tokens((1, 640))
    rank.engine.insert(ids)
    req = admit(rank, ids + tokens((2, 100)), "goes on")
    found = explained(rank, "goes on")
    assert found["checkpoint"] == 640 and found["checkpoint_tier"] == "device"
    assert found["cached"] == {"device": 640, "host": 0, "ssd": 0}
    assert found["computed_tokens"] == 100 and found["replayed"] == 0
    assert found["captures"] == [704]
    assert req.histate.details["checkpoint_tier"] == "device"
    admit(rank, ids[:500] + tokens((3, 100)), "inside")
    found = explained(rank, "inside")
    assert found["kv_found"] == 448 and found["restorable"] == 0 and found["replayed"] == 448
    assert found["replayed_because"] == [{"why": "not_captured", "start": 0, "end": 448}]


def test_the_second_chunk_says_nothing_new(rank) -> None:
    ids = tokens((1, 640))
    req = request(ids)
    req.rid = "chunks"
    rank.prefill(req, 0, 320)
    before = explained(rank, "chunks")
    rank.prefill(req, 320, 640)
    assert explained(rank, "chunks") == before
    (step,) = rank.engine.cache.explanations.activity()["series"]
    assert (step["requests"], step["computed"]) == (1, 640)


def test_what_is_not_only_tokens_is_not_compared(rank) -> None:
    ids = tokens((1, 300))
    admit(rank, ids, "plain")
    req = request(ids[:200] + tokens((2, 50)))
    req.rid, req.input_embeds = "pictures", [[0.0]]
    rank.prefill(req, 0, 250)
    assert explained(rank, "pictures")["prefix_break"] is None


def test_the_server_s_own_requests_are_nobody_s(rank) -> None:
    admit(rank, tokens((1, 100)), "HEALTH_CHECK_1")
    assert rank.engine.cache.explanations.latest(9) == []


def test_only_the_latest_are_remembered(rank) -> None:
    for number in range(12):
        admit(rank, tokens((number, 100)), f"r{number}")
    found = [one["rid"] for one in rank.engine.cache.explanations.latest(99)]
    assert found == [f"r{number}" for number in range(11, 3, -1)]
    assert [one["rid"] for one in rank.engine.cache.explanations.latest(2)] == ["r11", "r10"]


def nonces(rank: Rank, count: int, at: int = 30, length: int = 600, **changes: Any) -> None:
    for number in range(count):
        head = tokens((1, at)) + tokens((100 + number, 5))
        admit(rank, prompt(SYSTEM) + head + tokens((2, length)), f"n{number}", **changes)


def test_a_nonce_near_the_head_is_named_once(rank, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        nonces(rank, 3 + TIMES)
    (record,) = [record for record in caplog.records if "near the head" in record.message]
    assert "token 31 (system)" in record.message and f"rid=n{TIMES}" in record.message
    (found,) = rank.engine.cache.explanations.activity()["standing_breaks"]
    assert found["position"] == 31 and found["times"] == 2 + TIMES and found["place"] == "system"
    assert "namespace" not in found


def test_edits_further_back_and_other_prompts_are_no_habit(rank, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        nonces(rank, 5, length=200)  # little is lost
        for number in range(5):  # they only begin alike
            admit(rank, prompt(SYSTEM, (1, 40), (50 + number, 600)), f"o{number}")
        for number in range(5):  # in a user's turn, far back
            ids = prompt(SYSTEM, (3, 900), USER, (4, 300)) + tokens((80 + number, 4)) + tokens((5, 400))
            admit(rank, ids, f"e{number}")
    assert not caplog.records
    assert rank.engine.cache.explanations.activity()["standing_breaks"] == []


def test_the_warning_quotes_nothing() -> None:
    found = StandingBreak(b"tenant", 30, None, times=3, lost_tokens=3000, examples=["x"])
    assert "token 30 by" not in warning(found) and "1000 tokens" in warning(found)
    assert "tenant" not in warning(found)


@pytest.mark.parametrize(("old", "new"), [(5, 5), (1, 9), (20, 3), (30, 60)])
def test_alike_after_a_difference_of_another_length(old: int, new: int) -> None:
    tail = tokens((2, 400))
    one = np.array(tokens((1, 30)) + tokens((3, old)) + tail)
    other = np.array(tokens((1, 30)) + tokens((4, new)) + tail)
    # What follows the first tokens, which may all be different, is counted.
    assert alike_after(one, other, 30) == 400 - (SHORT_TOKENS - new)
    assert alike_after(other, one, 30) == 400 - (SHORT_TOKENS - old)


def test_alike_after_needs_something_behind() -> None:
    ids = np.array(tokens((1, 100)))
    assert alike_after(ids, np.array(tokens((2, 100))), 0) == 0
    assert alike_after(ids, ids, 90) == 0


# Who hears of it, and what is forgotten.


def ask(rank: Rank, **asked: Any) -> Any:
    return explain_routes.answer(rank.engine.cache, explain_routes.question(**asked))


def test_answers_are_plain_json(rank) -> None:
    nonces(rank, 4)
    for answer in (ask(rank, rid="n1"), ask(rank, last=3), ask(rank, activity=True)):
        assert json.loads(json.dumps(answer)) == answer and answer["enabled"] and answer["remembers"]


def test_questions_that_are_not_ours(rank) -> None:
    assert explain_routes.answer(rank.engine.cache, None) is None
    assert explain_routes.answer(rank.engine.cache, "histate-purge:all") is None
    assert explain_routes.answer(object(), explain_routes.question(last=1)) == {"enabled": False}


def test_ids_around_the_break_only_when_asked_for(rank) -> None:
    ids = tokens((1, 300))
    admit(rank, ids, "one")
    admit(rank, ids[:200] + tokens((2, 50)), "two")
    plain = ask(rank, rid="two")
    assert "around" not in plain and str(list(ids[190:200])) not in json.dumps(plain)
    around = ask(rank, rid="two", text=True)["around"]
    assert around["now"][:24] == around["before"][:24] == list(ids[176:200])
    assert around["now"][24:] == list(tokens((2, 24))) and around["before"][24:] == list(ids[200:224])
    assert ask(rank, rid="one", text=True)["around"] is None


def test_one_request_of_several_schedulers(rank) -> None:
    admit(rank, tokens((1, 100)), "here")
    mine, other = ask(rank, rid="here"), {"enabled": True, "remembers": True, "request": None}
    found, code = explain_routes.one([other, mine], "here")
    assert code == 200 and found["rid"] == "here" and found["enabled"]
    found, code = explain_routes.one([other, other], "away")
    assert code == 404 and "away" in found["error"]
    assert explain_routes.one([{"enabled": False}], "x") == ({"enabled": False}, 200)
    found, code = explain_routes.latest([{"enabled": True, "remembers": False}], 5)
    assert code == 404 and "--histate-explain-requests 0" in found["error"]
    found, code = explain_routes.latest([ask(rank, last=5), ask(rank, last=5)], 1)
    assert code == 200 and [one["rid"] for one in found["requests"]] == ["here"]


def test_a_flush_forgets_prompts_and_keeps_what_was_said(rank) -> None:
    ids = tokens((1, 300))
    admit(rank, ids, "before")
    rank.drain()
    rank.engine.cache.reset()
    rank.engine.kv.clear()
    rank.engine.states.clear()
    admit(rank, ids[:200] + tokens((2, 50)), "after")
    assert (
        explained(rank, "after")["prefix_break"] is None and explained(rank, "before")["prompt_tokens"] == 300
    )


def test_a_purge_forgets_its_tenant(rank) -> None:
    nonces(rank, 4, extra_key="gone")
    admit(rank, tokens((1, 300)), "stays")
    rank.drain()
    namespace = request(tokens((1, 9)), extra_key="gone")
    from sglang_histate.store import namespace_of

    purge.purge(rank.engine.cache, namespace_of(namespace.extra_key, None))
    explanations = rank.engine.cache.explanations
    assert [one["rid"] for one in explanations.latest(9)] == ["stays"]
    assert (
        explanations.activity()["standing_breaks"] == []
        and explanations.activity()["remembered_tokens"] == 300
    )


def test_details_without_explanations() -> None:
    req = request(tokens((1, 100)))
    assert hooks.add_cached_details(req, None) is None
    assert hooks.add_cached_details(req, {"device": 64, "host": 0}) == {"device": 64, "host": 0}
    rank = Rank(Alone())
    rank.prefill(req, 0, 100)
    assert hooks.add_cached_details(req, None) is None
    assert hooks.add_cached_details(req, {"device": 64}) == {"device": 64, "ssd_checkpoint": 0}
    rank.drain()
    rank.store.close()


def test_a_series_keeps_half_an_hour() -> None:
    series = HitSeries()
    for number in range(2 * STEPS):
        series.add(number * STEP_S, device=1, host=2, ssd=3, checkpoint_tier="ssd", replayed=4, computed=5)
    series.add(  # set back
        (2 * STEPS - 1) * STEP_S - 5, device=1, host=0, ssd=0, checkpoint_tier="host", replayed=0, computed=0
    )
    found = series.as_json(2 * STEPS * STEP_S)
    assert len(found) <= STEPS and found[-1]["requests"] == 2 and found[-1]["device"] == 2
    latest = found[-1]
    assert (latest["from_device"], latest["from_host"], latest["from_ssd"]) == (0, 1, 6)
    assert found[-1]["start_s"] == (2 * STEPS - 1) * STEP_S
    assert series.as_json(9 * STEPS * STEP_S) == []


def test_what_a_request_knows_of_its_keys_is_alike_where_nobody_explains(rank) -> None:
    """An abort drops what waits to be written under the keys that are known, and must do so alike on all ranks."""
    other = Rank(Alone())
    ids = prompt(SYSTEM, (1, 6 * PAGE), USER, (2, 30))
    known = []
    for made in (rank, other):
        req = request(ids)
        req.rid = "in chunks"
        assert made.engine.cache.request_ready(req)
        req.init_next_round_input(made.engine.cache, cow_mamba=False)
        made.prefill(req, 0, 2 * PAGE)
        known.append([req.histate.keys.known(page * PAGE) for page in range(1, len(ids) // PAGE + 1)])
    other.store.close()
    assert known[0] == known[1] and known[0][-1] is None
    assert explained(rank, "in chunks")["prompt_tokens"] == len(ids)


def test_a_fault_in_what_is_said_does_not_reach_the_scheduler(rank, monkeypatch, caplog) -> None:
    told = rank.engine.cache.explanations
    ids = prompt(SYSTEM, (1, 300))
    before = rank.counters.requests
    with monkeypatch.context() as broken:
        broken.setattr(told, "_finder", None)
        req = admit(rank, ids, "unlucky")
        admit(rank, ids, "as unlucky")
    assert rank.counters.requests == before + 2 and told.explain("unlucky") is None
    assert hooks.add_cached_details(req, None) is None
    assert [record.exc_info is not None for record in caplog.records if "explaining" in record.message] == [
        True
    ]
    admit(rank, ids, "lucky")
    assert told.explain("lucky") is not None
    monkeypatch.setattr(told, "_sessions", None)
    answer = ask(rank, activity=True)
    assert answer == {"enabled": True, "remembers": False, "failed": True}
    found, code = explain_routes.latest([answer], 5)
    assert code == 500 and "log" in found["error"]


def test_an_id_that_a_client_made_up_stays_on_its_line_in_the_log() -> None:
    found = StandingBreak(b"", 30, None, times=3, lost_tokens=900, examples=["x\nERROR forged & more"])
    assert "\n" not in warning(found) and "rid=x%0AERROR%20forged%20%26%20more " in warning(found)
