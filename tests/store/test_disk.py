"""The real file: what happens to it behind the store's back, and that buffered transfers leave no pages behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from sglang_histate.store import disk as disk_module
from sglang_histate.store import page_cache
from sglang_histate.store.disk import FilePlace, PosixDisk
from sglang_histate.store.file_lock import holders
from sglang_histate.store.probe import probe_directory

SIZE = 12 << 20
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk_module, "LOOK_AGAIN_S", 0.0)
    disk = PosixDisk.open(tmp_path / "slabs.dat")
    disk.preallocate(SIZE)
    yield disk
    disk.close()


def buffer(fill: int = 0, size: int = MIB) -> memoryview:
    memory = mmap.mmap(-1, size)
    memory[:] = bytes([fill]) * size
    return memoryview(memory)


def pages_in_memory(path: Path) -> int:
    """Return how many pages of the file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        count = -(-size // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * count)()
        whole = (ctypes.c_char * size).from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(whole)), ctypes.c_size_t(size), seen)
        del whole
    assert failed == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in seen)


@pytest.mark.parametrize("call", [page_cache._sync_file_range, None], ids=["range", "whole-file"])
def test_buffered_transfers_leave_nothing_in_the_page_cache(disk, monkeypatch, call):
    if probe_directory(disk.path.parent).filesystem in ("tmpfs", "ramfs"):
        pytest.skip("here the page cache is where the file lies")
    monkeypatch.setattr(page_cache, "_sync_file_range", call)
    assert not disk.direct
    disk.sync()
    for offset in range(0, 8 * MIB, MIB):
        assert disk.write_at([buffer(7)], offset) == MIB
        assert pages_in_memory(disk.path) == 0, "dirty pages stay unless they are written out first"
    target = buffer(0, 4 * MIB)
    assert disk.read_at([target], MIB) == 4 * MIB and bytes(target) == b"\7" * 4 * MIB
    assert pages_in_memory(disk.path) == 0, "neither what was read nor what was read ahead"


def test_the_measure_of_the_page_cache_measures(disk):
    os.pwrite(disk._fd, b"x" * MIB, 0)
    assert pages_in_memory(disk.path) == MIB // mmap.PAGESIZE


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_deleted_file_goes_on(tmp_path: Path, monkeypatch, what: str):
    monkeypatch.setattr(disk_module, "LOOK_AGAIN_S", 0.0)
    folder = tmp_path / "rank"
    folder.mkdir()
    disk = PosixDisk.open(folder / "slabs.dat")
    disk.preallocate(SIZE)
    disk.write_at([buffer(1)], 0)
    assert disk.file_place is FilePlace.PRESENT
    disk.path.unlink()
    if what == "directory":
        folder.rmdir()
    disk.write_at([buffer(2)], MIB)
    assert disk.file_place is FilePlace.DELETED
    disk.revive()
    for offset, fill in ((0, 1), (MIB, 2)):
        target = buffer()
        assert disk.read_at([target], offset) == MIB and bytes(target) == bytes([fill]) * MIB
    assert not disk.path.exists()
    disk.close()


def test_a_moved_and_a_replaced_file_are_noticed(disk):
    elsewhere = disk.path.with_name("moved")
    disk.path.rename(elsewhere)
    disk.read_at([buffer()], 0)
    assert disk.file_place is FilePlace.MISSING
    disk.path.write_bytes(b"a new one")
    disk.read_at([buffer()], 0)
    assert disk.file_place is FilePlace.REPLACED
    disk.revive()
    assert disk.write_at([buffer(3)], 0) == MIB and disk.path.read_bytes() == b"a new one"
    elsewhere.rename(disk.path)
    disk.read_at([buffer()], 0)
    assert disk.file_place is FilePlace.PRESENT


def test_the_path_is_looked_at_now_and_then_only(tmp_path: Path, monkeypatch):
    disk = PosixDisk.open(tmp_path / "slabs.dat")
    disk.preallocate(SIZE)
    looks = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda *a, **k: (looks.append(a), real(*a, **k))[1])
    for _ in range(20):
        disk.read_at([buffer()], 0)
    assert len(looks) <= 2
    disk.close()


def test_a_cut_file_is_made_whole(disk):
    disk.write_at([buffer(1)], 0)
    os.truncate(disk.path, MIB // 2)
    assert disk.read_at([buffer()], 0) == MIB // 2
    disk.revive()
    target = buffer()
    assert disk.path.stat().st_size == SIZE and disk.read_at([target], 0) == MIB
    assert bytes(target[: MIB // 2]) == b"\1" * (MIB // 2) and not any(target[MIB // 2 :])


def unplug(disk: PosixDisk) -> None:
    """From now on the descriptor leads to something that fails, as after the loss of a device."""
    reader, writer = os.pipe()
    os.dup2(reader, disk._fd, inheritable=False)
    os.close(reader)
    os.close(writer)


def test_a_disk_that_comes_back_is_opened_again(disk):
    disk.enable_direct(bytes(4096), [buffer()])
    disk.write_at([buffer(5)], MIB)
    away = disk.path.with_name("away")
    direct = disk.direct
    unplug(disk)
    disk.path.rename(away)
    with pytest.raises(OSError):
        disk.read_at([buffer()], 0)
    with pytest.raises(OSError):
        disk.revive()
    away.rename(disk.path)
    disk.revive()
    target = buffer()
    assert disk.read_at([target], MIB) == MIB and bytes(target) == b"\5" * MIB
    assert not os.get_inheritable(disk._fd) and disk.direct is direct
    assert bool(fcntl.fcntl(disk._fd, fcntl.F_GETFL) & os.O_DIRECT) is direct
    other = os.open(disk.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert holders(other, disk.path) == [os.getpid()]
    os.close(other)


def test_a_disk_that_somebody_else_uses_now_stays_away(disk):
    unplug(disk)
    other = os.open(disk.path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="in use by another process") as caught:
        disk.revive()
    assert caught.value.errno == errno.EBUSY
    os.close(other)
    disk.revive()
    assert disk.read_at([buffer()], 0) == MIB


def test_direct_io_that_stops_working_becomes_buffered(disk, monkeypatch):
    """Not for ever EINVAL (kvcache-ai/Mooncake#2348)."""
    if not disk.enable_direct(bytes(4096), [buffer()]):
        pytest.skip("no O_DIRECT here")
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}

    def refuse(name: str):
        def call(fd, buffers, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "invalid argument")
            return real[name](fd, buffers, offset)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refuse(name))
    assert disk.write_at([buffer(9)], MIB) == MIB and not disk.direct
    target = buffer()
    assert disk.read_at([target], MIB) == MIB and bytes(target) == b"\x09" * MIB
    with pytest.raises(OSError, match="nvalid"):
        disk.read_at([buffer()], -4096)
