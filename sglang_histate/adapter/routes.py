"""HiState's routes on SGLang's HTTP application.

All that say anything follow the rule of SGLang's /flush_cache: with ``--admin-api-key`` that key opens them, with
``--api-key`` alone that one does, with neither everybody may call. The status page itself is a fixed text; it asks the
others, and its reader for a key if they want one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from sglang_histate.adapter import explain_routes, interrupt, purge

PAGE = Path(__file__).with_name("status_page.html")


def install_routes(app: Any) -> None:
    """Add the routes to `app`, and have Ctrl-C end it as SIGTERM does."""
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import AuthLevel, auth_level

    interrupt.end_gracefully_while_serving(app)

    def manager() -> Any:
        from sglang.srt.entrypoints.http_server import _global_state

        return _global_state.tokenizer_manager

    async def ask(rid: str) -> list[dict[str, Any]]:
        """Return what each scheduler answers to a question of ours."""
        manager().auto_create_handle_loop()
        replies = await manager().get_internal_state_communicator(GetInternalStateReq(rid=rid))
        return [reply.internal_state.get("histate", {"enabled": False}) for reply in replies]

    @app.get("/histate")
    async def histate_page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=_HEADERS)

    @app.get("/histate/status")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_status() -> dict[str, Any]:
        states = await manager().get_internal_state()
        ranks = [state.get("histate", {"enabled": False}) for state in states]
        return {"enabled": all(rank["enabled"] for rank in ranks), "ranks": ranks, **ranks[0]}

    @app.get("/histate/activity")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_activity() -> dict[str, Any]:
        ranks = await ask(explain_routes.question(activity=True))
        return {"enabled": all(rank["enabled"] for rank in ranks), "ranks": ranks}

    @app.get("/histate/explain")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_explain(rid: str | None = None, last: int = 20, text: bool = False) -> Response:
        if rid is None:
            if not 1 <= last <= explain_routes.MOST:
                return JSONResponse({"error": f"last={last} is outside 1 to {explain_routes.MOST}"}, 400)
            return JSONResponse(*explain_routes.latest(await ask(explain_routes.question(last=last)), last))
        if text and not get_serving().admin_api_key:
            return JSONResponse({"error": explain_routes.NO_ADMIN}, 403)
        found, code = explain_routes.one(await ask(explain_routes.question(rid=rid, text=text)), rid)
        around, tokenizer = found.pop("around", None), manager().tokenizer
        if around is not None and tokenizer is not None:
            found["text"] = {which: tokenizer.decode(ids) for which, ids in around.items()}
        return JSONResponse(found, code)

    @app.post("/histate/purge")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_purge(request: Request) -> Response:
        try:
            task = purge.task_of(await request.json())
        except ValueError as error:  # also of a body that is no JSON
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(await purge.run(ask, task))


# The page needs nothing from anywhere else, and nobody has to show it inside another one.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
