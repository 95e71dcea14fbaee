"""`histate store stats`: how much of what, how old, and what a running server says of it."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from sglang_histate.cli.store import common


def register(actions: Any) -> None:
    parser = common.add_action(
        actions,
        "stats",
        "count entries and bytes by kind and age, from headers and snapshots, and from the server with --url",
        "histate store stats --ssd-dir /nvme/histate --url http://127.0.0.1:30000",
    )
    common.add_server(parser, "for its own counters")
    common.add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from sglang_histate.cli.store.summary import facts

    refused: list[str] = []
    stores = [
        facts(file)
        for root in arguments.ssd_dir
        for file in common.open_files(root, os.O_RDONLY, refused.append)
    ]
    server = None if arguments.url is None else _server(common.ask_server(arguments, "/histate/status"))
    if arguments.json:
        print(json.dumps({"stores": stores, "server": server, "refused": refused}, indent=1))
    else:
        for store in stores:
            _print(store)
        if not stores:
            print("no store")
        for name, value in (server or {}).items():
            print(f"server {name:<28}{value}")
    for sentence in refused:
        common.complain(sentence)
    return 1 if refused else 0


def _server(status: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a status that is about the SSD, of the first rank."""
    ssd, counters = status["tiers"]["ssd"], status["counters"]
    wanted = (
        "ssd_reads_total",
        "ssd_read_bytes_total",
        "ssd_written_bytes_total",
        "ssd_restored_requests_total",
    )
    return {
        "entries": ssd["entries"],
        "used_bytes": ssd["checkpoints"]["used_bytes"],
        "total_bytes": ssd["checkpoints"]["total_bytes"],
        **{name: counters[name] for name in wanted if name in counters},
        "dropped": counters["ssd_entries_dropped_total"],
        "misses": counters["ssd_read_misses_total"],
    }


def _print(store: dict[str, Any]) -> None:
    from sglang_histate.sizes import format_size

    print(store["file"])
    if store["state"] != "store":
        print(f"  {store['state']}")
        return
    for kind, count in store["entries"].items():
        print(f"  {kind:<12}{count:>8} entries {format_size(store['content_bytes'][kind]):>12}")
    total = store["slabs"] * store["slab_bytes"]
    print(f"  slabs       {format_size(store['bytes_used'])} of {format_size(total)}")
    most = max(store["ages"].values(), default=0)
    for name, count in store["ages"].items():
        label = name if name == "older" else f"< {name}"
        print(f"  {label:<12}{count:>8} {'#' * (0 if not most else -(-count * 40 // most))}")
    written = store["written_today_bytes"]
    print(f"  today       {'unknown' if written is None else format_size(written)} written")
    print(f"  order       snapshot {store['snapshot']}, {store['snapshot_names']} names")
