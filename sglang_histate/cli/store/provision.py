"""`histate store provision`: make slab files as large as they will be, and write them once, before a server needs them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_histate.cli.arguments import size_bytes
from sglang_histate.cli.progress import progress
from sglang_histate.cli.store import common

if TYPE_CHECKING:
    from sglang_histate.store.survey import SlabFile


def register(actions: Any) -> None:
    parser = common.add_action(
        actions,
        "provision",
        "reserve the space of known stores, and with --zero write it once so that first writes are not slower",
        "histate store provision --ssd-dir /nvme/histate --size 200GiB --zero",
    )
    parser.add_argument(
        "--size",
        type=size_bytes,
        metavar="SIZE",
        help="as --histate-ssd-size, of all directories together (default: as large as they are)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="make stores for the same models and ranks as the ones in DIR, empty; needs one --ssd-dir and --size",
    )
    parser.add_argument(
        "--zero",
        action="store_true",
        help="write zeros to all space that was never written: costs the drive as many bytes, keeps all records",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.like is not None and (len(arguments.ssd_dir) != 1 or arguments.size is None):
        common.complain("--like makes new stores in one --ssd-dir, with --size: give both")
        return 2
    failures: list[str] = []
    if arguments.like is not None:
        _plant(arguments, failures.append)
    for number, root in enumerate(arguments.ssd_dir):
        known = 0
        for file in common.open_files(root, os.O_RDWR, failures.append):
            known += 1
            _provision(file, number, arguments, failures.append)
        if not known:
            failures.append(
                f"{root} has no store: start the server on it once, so that the sizes of its model are known, or "
                "name a directory that has one with --like"
            )
    for sentence in failures:
        common.complain(sentence)
    return 1 if failures else 0


def _plant(arguments: argparse.Namespace, fail: Any) -> None:
    from sglang_histate.store.provision import plant
    from sglang_histate.store.reasons import StoreError
    from sglang_histate.store.survey import FileState

    for file in common.open_files(arguments.like, os.O_RDONLY, fail):
        if file.state is FileState.STORE:
            try:
                plant(arguments.ssd_dir[0], file, arguments.size)
            except StoreError as error:
                fail(str(error))


def _provision(file: SlabFile, number: int, arguments: argparse.Namespace, fail: Any) -> None:
    """Provision a file in the directory of that number."""
    from sglang_histate.sizes import format_size
    from sglang_histate.store.provision import reserve, unwritten, wanted_bytes, write_zeros
    from sglang_histate.store.reasons import StoreError

    try:
        size = wanted_bytes(file, arguments.size, number, len(arguments.ssd_dir))
        reserve(file, size)
        gaps = list(unwritten(file.fd, size)) if arguments.zero else []
        total = sum(count for _, count in gaps)
        with progress(total, "B", file.name) as tell:
            for offset, count in gaps:
                write_zeros(file.fd, offset, count, tell)
    except StoreError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file.path} could not be written ({error.strerror}): check the disk")
    else:
        zeroed = f", {format_size(total)} written" if arguments.zero else ""
        print(f"{file.path}: {format_size(size)} reserved{zeroed}")
