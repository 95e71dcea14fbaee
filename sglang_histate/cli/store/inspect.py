"""`histate store inspect`: which stores are there, whose they are, what is in them, and who has them open."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from sglang_histate.cli.store import common


def register(actions: Any) -> None:
    parser = common.add_action(
        actions,
        "inspect",
        "show every store: model, format, entries, bytes, who has it open; reads headers only",
        "histate store inspect --ssd-dir /nvme0/histate,/nvme1/histate --json",
    )
    common.add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from sglang_histate.cli.store.summary import facts
    from sglang_histate.store.survey import survey

    refused: list[str] = []
    roots = []
    for root in arguments.ssd_dir:
        files = [facts(file) for file in common.open_files(root, os.O_RDONLY, refused.append)]
        roots.append({"root": str(root), "stores": files, "not_ours": list(survey(root).strangers)})
    if arguments.json:
        print(json.dumps({"roots": roots, "refused": refused}, indent=1))
    else:
        for one in roots:
            _print_root(one)
    for sentence in refused:
        common.complain(sentence)
    return 1 if refused else 0


def _print_root(root: dict[str, Any]) -> None:
    print(root["root"])
    for store in root["stores"]:
        print(f"  {os.path.relpath(os.path.dirname(store['file']), root['root'])}")
        for name, value in _lines(store):
            print(f"    {name:<11}{value}")
    if not root["stores"]:
        print("  no store")
    if root["not_ours"]:
        print(f"  not of a store, left alone: {', '.join(root['not_ours'])}")


def _lines(store: dict[str, Any]) -> list[tuple[str, str]]:
    from sglang_histate.sizes import format_size

    size = f"{format_size(store['file_bytes'])}, {format_size(store['allocated_bytes'])} on disk"
    if store["state"] != "store":
        what = {
            "empty": "no server has opened it yet",
            "other_version": f"of format {store['format']}: left alone",
            "damaged": "no sound superblock: the next start begins with an empty store",
        }[store["state"]]
        return [("state", what), ("file", size)]
    states = store["slabs_by_state"]
    lost = {
        name: states[name]
        for name in ("expired", "other_version", "other_fingerprint", "unsound", "unreadable")
    }
    entries = ", ".join(
        f"{count} {kind} ({format_size(store['content_bytes'][kind])})"
        for kind, count in store["entries"].items()
    )
    lines = [
        ("state", _state(store)),
        ("format", f"{store['format']}, epoch {store['epoch']}"),
        ("identity", _identity(store["identity"])),
        ("file", size),
        (
            "slabs",
            f"{store['slabs'] - states['empty']} of {store['slabs']}, {format_size(store['slab_bytes'])} each",
        ),
        ("entries", entries),
        (
            "written",
            f"{store['oldest_write']} to {store['newest_write']}" if store["oldest_write"] else "nothing",
        ),
        (
            "tenants",
            f"{store['tenants']}; {store['entries_without_tenant']} entries without salt or extra key",
        ),
        ("snapshot", f"{store['snapshot']}, {store['snapshot_names']} names"),
    ]
    if any(lost.values()):
        lines.append(("of no use", ", ".join(f"{count} {name}" for name, count in lost.items() if count)))
    if store["quarantined"]:
        lines.append(("quarantine", store["quarantined"]))
    return lines


def _state(store: dict[str, Any]) -> str:
    if store["holder_pid"] is not None:
        return f"open, process {store['holder_pid'] or 'unknown (not visible from here)'}"
    return "closed in order" if store["closed_in_order"] else "not closed in order"


def _identity(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "longer than the superblock"
    return ", ".join(
        f"{name} {_short(value)}" for name, value in identity.items() if value not in ([], {}, "None")
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:12] + "..."
