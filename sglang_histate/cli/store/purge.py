"""`histate store purge`: take records away for good, all or one tenant's."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_histate.cli.progress import progress
from sglang_histate.cli.store import common

if TYPE_CHECKING:
    from sglang_histate.store.survey import SlabFile

_PURGE_PATH = "/histate/purge"
_WAIT_S = 30.0


def register(actions: Any) -> None:
    parser = common.add_action(
        actions,
        "purge",
        "erase everything, or one tenant with --salt and --extra-key; an open store is purged by its server (--url)",
        "histate store purge --ssd-dir /nvme/histate --salt tenant-7 --url http://127.0.0.1:30000",
    )
    parser.add_argument(
        "--salt",
        metavar="S",
        help="the tenant's cache_salt; '' together with no --extra-key: requests with neither",
    )
    parser.add_argument(
        "--extra-key", metavar="K", help="the tenant's extra_key; a LoRA adapter's id is part of it"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write zeros over the records too, not only over their headers; not on an open store",
    )
    common.add_server(parser, "for stores that are open")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    namespace = _namespace(arguments)
    failures: list[str] = []
    live: list[tuple[Path, Path]] = []
    for root in arguments.ssd_dir:
        for file in common.open_files(root, os.O_RDWR, failures.append):
            if not file.live:
                _purge_closed(file, namespace, arguments.overwrite, failures.append)
            elif arguments.url is None:
                failures.append(
                    f"{file.path} is open ({common.held_by(file)}): give --url of that server, or stop it"
                )
            elif arguments.overwrite:
                failures.append(f"{file.path} is open ({common.held_by(file)}): --overwrite needs it closed")
            else:
                live.append((root, file.path))
    if live:
        _purge_open(arguments, namespace, live, failures.append)
    for sentence in failures:
        common.complain(sentence)
    return 1 if failures else 0


def _namespace(arguments: argparse.Namespace) -> bytes | None:
    from sglang_histate.store.namespaces import namespace_of

    if arguments.salt is None and arguments.extra_key is None:
        return None
    return namespace_of(arguments.extra_key, arguments.salt)


def _purge_closed(file: SlabFile, namespace: bytes | None, overwrite: bool, fail: Any) -> None:
    from sglang_histate.store.purge import purge_all, purge_namespace
    from sglang_histate.store.reasons import StoreError
    from sglang_histate.store.survey import FileState

    try:
        with progress(file.slab_count, "slab", file.name) as tell:
            if namespace is None:
                records = purge_all(file, overwrite=overwrite, progress=tell)
                print(f"{file.path}: {records} records erased, file removed")
            elif file.state is FileState.STORE:
                records = purge_namespace(file, namespace, overwrite=overwrite, progress=tell)
                print(f"{file.path}: {records} records erased")
            elif file.state is not FileState.EMPTY:
                fail(f"{file.path} is {file.state.value} and stays: what is whose cannot be told in it")
    except StoreError as error:
        fail(str(error))


def _purge_open(
    arguments: argparse.Namespace, namespace: bytes | None, live: list[tuple[Path, Path]], fail: Any
) -> None:
    from sglang_histate.store.reasons import StoreError

    started_us = int(time.time() * 1e6)
    body = {"all": True} if namespace is None else {"namespace": namespace.hex()}
    try:
        answer = common.ask_server(arguments, _PURGE_PATH, body)
    except StoreError as error:
        fail(str(error))
        return
    print(
        f"{arguments.url}: {answer['ssd_entries']} entries of the SSD and {answer['nodes']} nodes in memory dropped"
    )
    if answer["in_use"]:
        fail(
            f"{answer['in_use']} nodes in memory are in use by running requests: purge again when these have ended"
        )
    if not answer["erased"]:
        fail("the server could not erase everything from its disks: see its log and purge again")
    for root, path in live:
        left = _wait_erased(root, path, namespace, started_us)
        if left:
            fail(f"{path} still has {left} records: is it the store of the server at {arguments.url}?")
        else:
            print(f"{path}: erased")


def _wait_erased(root: Path, path: Path, namespace: bytes | None, before_us: int) -> int:
    """Return how many records from before `before_us` are left once nothing changes any more, 0 as soon as none is."""
    from sglang_histate.store.survey import SlabFile

    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            with SlabFile.open(root, path) as file:
                left = sum(
                    slab.header is not None
                    and (namespace is None or slab.header.namespace == namespace)
                    and slab.header.captured_at_us < before_us
                    for slab in file.headers()
                )
        except FileNotFoundError:
            return 0
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)
