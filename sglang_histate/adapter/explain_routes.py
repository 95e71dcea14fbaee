"""GET /histate/explain and GET /histate/activity: what the cache did for the latest requests, and what it holds.

    route (HTTP process)    asks every scheduler, as a purge does, in the `rid` of the question for the internal state
    answer (scheduler)      answers from `Explanations`

Positions and places are for whoever may see the status. Words are not: `text=1` is for the holder of the admin key only,
because a server without one cannot tell its owner from anybody else.
"""

from __future__ import annotations

import json
from typing import Any

from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.explanations import Explanations
from sglang_histate.adapter.for_people import for_people

PREFIX = "histate-explain:"
MOST = 1000

NO_ADMIN = "text=1 shows words of prompts: it needs a server with --admin-api-key, and that key"
SWITCHED_OFF = "nothing is remembered of requests: the server runs with --histate-explain-requests 0"

FAILED = "the question could not be answered: the server's log has the fault"


def question(**asked: Any) -> str:
    """Return the `rid` that asks for `rid` (one request), `last` (so many) or `activity`; with `text` words too."""
    return PREFIX + json.dumps(asked)


def answer(tree_cache: Any, rid: str | None) -> dict[str, Any] | None:
    """Return the answer to a question for the internal state with this `rid`; None if it is none of ours."""
    if rid is None or not rid.startswith(PREFIX):
        return None
    if not isinstance(tree_cache, HiStateCache) or tree_cache.tier is None:
        return {"enabled": False}
    explanations = tree_cache.explanations
    if explanations is None:
        return {"enabled": True, "remembers": False}
    found = _answer(explanations, json.loads(rid.removeprefix(PREFIX)))
    if found is None:
        return {"enabled": True, "remembers": False, "failed": True}
    return {"enabled": True, "remembers": True, **found}


@for_people("answering what was asked about requests")
def _answer(explanations: Explanations, asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("activity"):
        return explanations.activity()
    if "rid" not in asked:
        return {"requests": explanations.latest(asked["last"])}
    found: dict[str, Any] = {"request": explanations.explain(asked["rid"])}
    if asked.get("text"):
        found["around"] = explanations.around(asked["rid"])
    return found


def one(ranks: list[dict[str, Any]], rid: str) -> tuple[dict[str, Any], int]:
    """Return what the schedulers say about one request, and the HTTP status."""
    for rank in ranks:
        if rank.get("request") is not None:
            more = {"around": rank["around"]} if "around" in rank else {}
            return {"enabled": True, **rank["request"], **more}, 200
    return _nothing(ranks) or (
        {
            "error": f"nothing is known of request {rid}: it was not seen, is older than the "
            "--histate-explain-requests latest ones, has not been admitted yet, or its tenant was purged"
        },
        404,
    )


def latest(ranks: list[dict[str, Any]], last: int) -> tuple[dict[str, Any], int]:
    """Return what the schedulers say about the latest requests, the latest first, and the HTTP status."""
    nothing = _nothing(ranks)
    if nothing is not None:
        return nothing
    found = [request for rank in ranks for request in rank.get("requests", ())]
    found.sort(key=lambda request: -request["admitted_s"])
    return {"enabled": True, "requests": found[:last]}, 200


def _nothing(ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], int] | None:
    if not all(rank["enabled"] for rank in ranks):
        return {"enabled": False}, 200
    if any(rank.get("failed") for rank in ranks):
        return {"error": FAILED}, 500
    if not any(rank.get("remembers") for rank in ranks):
        return {"error": SWITCHED_OFF}, 404
    return None
