"""`histate explain`: what a running server's cache did for one request, or for the latest ones, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import urlencode

from sglang_histate.cli.store import common

DEFAULT_URL = "http://127.0.0.1:30000"
_EXAMPLES = """examples:
  histate explain                          the latest requests of a server on this machine, one a line
  histate explain chatcmpl-4f1c            one of them; its id is the `id` of the answer, or `meta_info.id`
  histate explain RID --text               with the words around the prefix break (needs the server's admin key)

exit codes: 0 all is well, 1 the server knows nothing of the request or cannot be asked, 2 bad usage"""


def register(subparsers: Any) -> None:
    """Add the command to the parser of `histate`."""
    parser = subparsers.add_parser(
        "explain",
        help="why a running server reused what it did of a prompt",
        description="Ask a running server what its cache did for one request, or for the latest ones, and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rid", nargs="?", help="the request's id; without it the latest requests are listed")
    parser.add_argument(
        "--last", type=int, default=20, metavar="N", help="list so many requests (default: 20)"
    )
    parser.add_argument("--text", action="store_true", help="show the words around the prefix break")
    common.add_server(parser, f"(default: {DEFAULT_URL})", DEFAULT_URL)
    common.add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.rid is None:
        asked: dict[str, Any] = {"last": arguments.last}
    else:
        asked = {"rid": arguments.rid} | ({"text": 1} if arguments.text else {})
    found = common.ask_server(arguments, f"/histate/explain?{urlencode(asked)}")
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.rid is None:
        for line in table(found["requests"]):
            print(line)
    else:
        for line in sentences(found):
            print(line)
    return 0


def table(requests: list[dict[str, Any]]) -> list[str]:
    """Return one line per request, with a head."""
    if not requests:
        return ["no request yet"]
    names = [printable(request["rid"]) for request in requests]
    widest = max(map(len, ("request", *names)))
    lines = [f"{'request':<{widest}}  {'prompt':>8} {'reused':>8} {'replayed':>8}  from    prefix break"]
    for name, request in zip(names, requests, strict=True):
        tier = request["checkpoint_tier"] or "-"
        lines.append(
            f"{name:<{widest}}  {request['prompt_tokens']:>8} {request['checkpoint']:>8} "
            f"{request['replayed']:>8}  {tier:<6}  {_where(request['prefix_break'])}"
        )
    return lines


def sentences(found: dict[str, Any]) -> list[str]:
    """Return what to say about one request."""
    cached, broken = found["cached"], found["prefix_break"]
    output = "" if found["output_tokens"] is None else f", output {found['output_tokens']} tokens"
    lines = [f"request {printable(found['rid'])}: prompt {found['prompt_tokens']} tokens{output}"]
    if found["checkpoint"]:
        lines.append(
            f"  reused    {found['checkpoint']} tokens, from the checkpoint there, which was on the "
            f"{found['checkpoint_tier']}; their KV: {cached['device']} on the device, {cached['host']} on the host, "
            f"{cached['ssd']} on the SSD"
        )
    else:
        lines.append("  reused    nothing")
    lines.append(
        f"  computed  {found['computed_tokens']} tokens, {found['replayed']} of them although their KV was there"
    )
    for part in found["replayed_because"]:
        lines.append(f"            {part['start']} to {part['end']}: {part['why'].replace('_', ' ')}")
    lines.append(f"  found     KV up to {found['kv_found']}, restorable up to {found['restorable']}")
    lines.append(f"  captured  at {', '.join(map(str, found['captures'])) or 'no position'}")
    lines.append(f"  break     {_where(broken)}")
    if broken is not None:
        against = printable(broken["against"] or "") or "a prompt whose request is forgotten"
        lines.append(f"            against {against}" + _was(broken))
        if broken["alike_after"]:
            lines.append(
                f"            after a few tokens {broken['alike_after']} more are alike again, which could not be reused"
            )
    for which, text in found.get("text", {}).items():
        lines.append(f"  {which:<9} {text!r}")
    return lines


def printable(rid: str) -> str:
    """Return a request's id, which its client may have chosen, without what would move a terminal's cursor."""
    return rid if rid.isprintable() else ascii(rid)


def _where(broken: dict[str, Any] | None) -> str:
    if broken is None:
        return "none"
    return f"token {broken['position']}" + (f", {broken['place']}" if broken["place"] else "")


def _was(broken: dict[str, Any]) -> str:
    if broken["before"] is None or broken["before"] == broken["place"]:
        return ""
    return f", which goes on with {broken['before']}"
