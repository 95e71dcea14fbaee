"""Directories the store must refuse, each with one sentence that names the flag."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_histate.store import StoreError, probe_directory

from .conftest import LAYOUT, SLAB, key, open_store, put, settle


def test_facts(tmp_path: Path, root: Path):
    store = open_store(root)
    facts = probe_directory(root)
    assert facts.writable and facts.free_bytes > 0 and facts.filesystem != "unknown"
    assert facts.direct_io == store.stats().direct_io
    assert [size >= 4 * SLAB for _, size in facts.stores] == [True]
    assert not list(root.glob(".histate-probe*"))
    store.close()


def test_second_process_is_refused(root: Path):
    store = open_store(root)
    code = f"""
import sys
from pathlib import Path
from sglang_histate.store import *
try:
    CheckpointStore.open(
        roots=[Path(sys.argv[1])], allow_any_filesystem=True, fingerprint={{"model": "test"}}, rank_name="tp0of1-pp0of1",
        size_bytes={4096 + 4 * SLAB}, layout=RecordLayout({LAYOUT.segment_bytes}, {LAYOUT.kv_page_bytes}), record_buffers=2,
    ).close()
except StoreError as error:
    print("refused", error)
else:
    print("opened")
"""

    def other_process() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True
        ).stdout

    assert (
        other_process().startswith("refused --histate-ssd-dir")
        and "in use by another process" in other_process()
    )
    store.close()
    assert other_process() == "opened\n"


def test_foreign_things_in_the_place_of_the_file(root: Path, tmp_path: Path):
    store = open_store(root)
    (file,) = root.glob("*/*/slabs.dat")
    assert file.stat().st_mode & 0o777 == 0o600
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (file.parent, file.parent.parent))
    assert file.stat().st_size == 4096 + 4 * SLAB
    store.close()
    file.unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    file.symlink_to(target)
    with pytest.raises(StoreError, match="symbolic link"):
        open_store(root)
    assert target.read_text() == "precious"
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError):
        open_store(root)
    file.rmdir()
    file.parent.chmod(0o770)
    with pytest.raises(StoreError, match="no one else can write"):
        open_store(root)


def test_file_never_exceeds_the_size(root: Path):
    for size in (4096 + 2 * SLAB, 4096 + 5 * SLAB - 1, 4096 + 3 * SLAB + 17):
        store = open_store(root, size_bytes=size)
        (file,) = root.glob("*/*/slabs.dat")
        assert file.stat().st_size <= size and file.stat().st_blocks * 512 <= size + 4096
        assert store.stats().file_bytes == file.stat().st_size
        store.close()


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 9000])
def test_damaged_file_is_taken_over(root: Path, damage: bytes):
    open_store(root).close()
    (file,) = root.glob("*/*/slabs.dat")
    file.write_bytes(damage)
    store = open_store(root)
    assert store.stats().entries == 0 and file.stat().st_size == 4096 + 4 * SLAB
    store.close()


def test_epoch_grows_so_that_old_slabs_never_match(root: Path):
    epochs = []
    for _ in range(3):
        store = open_store(root)
        epochs.append(store._intake._epoch)
        store.close()
    assert epochs == [1, 2, 3]


@pytest.mark.parametrize("call", ["fcntl", "pwritev", "preadv"])
def test_without_direct_io_the_store_is_buffered(root: Path, monkeypatch, call: str):
    """EINVAL at the flag or at the first direct transfer; the rest of the run must work."""
    real_fcntl, real = fcntl.fcntl, {"pwritev": os.pwritev, "preadv": os.preadv}

    def fake_fcntl(fd, command, argument=0):
        if call == "fcntl" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real_fcntl(fd, command, argument)

    def fake_transfer(fd, buffers, offset):
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real[call](fd, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", fake_fcntl)
    if call != "fcntl":
        monkeypatch.setattr(os, call, fake_transfer)
    store = open_store(root)
    assert not store.stats().direct_io
    put(store, 1)
    settle(store)
    ticket = store.begin_read(key(1))
    settle(store)
    assert ticket.ok and (ticket.record.payload == 1).all()
    store.close()


def test_rank_names_stay_in_the_directory(root: Path):
    for name in ("../x", "", "a/b", ".."):
        with pytest.raises(ValueError):
            open_store(root, rank_name=name)
