"""`histate store verify`: read all payloads and check all sums."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from sglang_histate.cli.arguments import size_bytes
from sglang_histate.cli.progress import progress
from sglang_histate.cli.store import common

if TYPE_CHECKING:
    from sglang_histate.store.survey import SlabFile


def register(actions: Any) -> None:
    parser = common.add_action(
        actions,
        "verify",
        "read every record and check every sum; changes nothing, also beside a running server",
        "histate store verify --ssd-dir /nvme/histate --rate 200MiB",
    )
    parser.add_argument(
        "--rate", type=_rate, metavar="SIZE", help="most bytes per second, such as 200MiB (default: no limit)"
    )
    common.add_json(parser)
    parser.set_defaults(run=_run)


def _rate(text: str) -> int:
    rate = size_bytes(text)
    if rate == 0:
        raise argparse.ArgumentTypeError("at a rate of 0 nothing would ever be read")
    return rate


def _run(arguments: argparse.Namespace) -> int:
    refused: list[str] = []
    results = [
        _verify(file, arguments.rate)
        for root in arguments.ssd_dir
        for file in common.open_files(root, os.O_RDONLY, refused.append)
    ]
    if arguments.json:
        print(json.dumps({"stores": results, "refused": refused}, indent=1))
    else:
        for result in results:
            _print(result)
        if not results and not refused:
            print("no store")
    for sentence in refused:
        common.complain(sentence)
    return 1 if refused or any(result["bad"] for result in results) else 0


def _verify(file: SlabFile, rate: int | None) -> dict[str, Any]:
    from sglang_histate.cli.store.summary import snapshot_of
    from sglang_histate.store.snapshot import SnapshotState
    from sglang_histate.store.survey import FileState
    from sglang_histate.store.verify import Verification

    said: dict[str, Any] = {"file": str(file.path), "state": file.state.value, "live": file.live, "bad": {}}
    if file.state is not FileState.STORE:
        if file.state is FileState.DAMAGED:
            said["bad"] = {"superblock": 1}
        return said
    with progress(file.slab_count, "slab", file.name) as tell:
        found = Verification(file, rate).run(tell)
    said["bad"] = {reason.value: count for reason, count in sorted(found.bad.items())}
    if snapshot_of(file)[1] in (SnapshotState.TORN, SnapshotState.UNREADABLE):
        said["bad"]["snapshot"] = 1
    return said | {
        "sound": {kind.value: count for kind, count in sorted(found.sound.items())},
        "bad_slabs": [{"slab": slab, "reason": reason.value} for slab, reason in found.named],
        "expired": found.expired,
        "other_version": found.other_version,
        "unsettled": found.unsettled,
        "read_bytes": found.read_bytes,
    }


def _print(result: dict[str, Any]) -> None:
    from sglang_histate.sizes import format_size

    print(result["file"])
    if result["state"] != "store":
        print(f"  {result['state']}: not read")
        return
    sound = ", ".join(f"{count} {kind}" for kind, count in result["sound"].items()) or "nothing"
    print(f"  sound      {sound}")
    bad = ", ".join(f"{count} {reason}" for reason, count in result["bad"].items()) or "nothing"
    print(f"  bad        {bad}")
    for one in result["bad_slabs"]:
        print(f"             slab {one['slab']}: {one['reason']}")
    print(f"  not read   {result['expired']} cleared, {result['other_version']} of another format")
    if result["unsettled"]:
        print(f"  not judged {result['unsettled']} that were written to all the time")
    print(f"  read       {format_size(result['read_bytes'])}{' beside a server' if result['live'] else ''}")
