"""Every directory and size that a store refuses at the start: one sentence with the flag, the value and the way out."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_histate.store import StoreError, check_roots, probe
from sglang_histate.store.probe import UNSUITABLE_FILESYSTEMS

from .conftest import SLAB, open_store

MIB = 1 << 20


@pytest.fixture(autouse=True)
def local_disk(monkeypatch):
    """Wherever the temporary directories of this machine lie."""
    monkeypatch.setattr(probe, "_filesystem", lambda *_: "ext4")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good"
    path.mkdir(0o700)
    return path


def refusal(*roots: Path, size: int = MIB, **more) -> str:
    with pytest.raises(StoreError) as caught:
        check_roots(list(roots), size, **more)
    text = str(caught.value)
    assert "--histate-ssd" in text and "\n" not in text and len(text) < 400
    return text


def test_only_the_last_part_of_a_path_is_created(tmp_path: Path):
    check_roots([tmp_path / "new"], MIB)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    text = refusal(tmp_path / "a" / "b")
    assert f"{tmp_path}/a/b does not exist and neither does {tmp_path}/a: create it or check that the" in text
    assert not (tmp_path / "a").exists()


def test_the_directory_cannot_be_created(tmp_path: Path, monkeypatch):
    def refuse(*_a, **_k):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "new cannot be created (Permission denied): use a directory of your own" in refusal(
        tmp_path / "new"
    )


def test_not_a_directory(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    assert f"{tmp_path}/file is not a directory: remove it or use another path" in refusal(tmp_path / "file")


@pytest.mark.parametrize("target", ["good", "nowhere"])
def test_a_symbolic_link(good: Path, target: str):
    link = good.parent / "link"
    link.symlink_to(good.parent / target)
    assert f"{link} is a symbolic link" in (text := refusal(link))
    assert text.endswith(f"give {good.parent / target} itself")
    assert not (good.parent / "nowhere").exists()


def test_a_foreign_owner(good: Path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: good.stat().st_uid + 7)
    uid = good.stat().st_uid
    assert f"{good} belongs to user {uid}, this process runs as {uid + 7}: use a directory" in refusal(good)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_others_may_write(good: Path, mode: int):
    good.chmod(mode)
    assert f"{good} may be written by other users (mode {mode:04o}): run chmod 700 {good}" in refusal(good)


@pytest.mark.parametrize("name", sorted(UNSUITABLE_FILESYSTEMS))
def test_an_unsuitable_file_system(good: Path, monkeypatch, caplog, name: str):
    monkeypatch.setattr(probe, "_filesystem", lambda *_: name)
    text = refusal(good)
    assert f"--histate-ssd-dir {good} is on {name}, " in text
    assert text.endswith("use a directory on a local disk, or add --histate-allow-any-filesystem")
    check_roots([good], MIB, allow_any_filesystem=True)
    assert f"{good} is on {name}" in caplog.text


def test_memory_is_recognised_for_real(monkeypatch):
    monkeypatch.undo()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if "tmpfs" not in (kind := probe.probe_directory(Path(folder)).filesystem):
            pytest.skip(f"/dev/shm is {kind} here")
        assert "is on tmpfs, which is memory and no disk; use a directory on a local disk" in refusal(
            Path(folder)
        )


def test_file_systems_that_are_fine(good: Path, monkeypatch, caplog):
    for name in ("ext4", "xfs", "btrfs", "zfs", "f2fs", "unknown"):
        monkeypatch.setattr(probe, "_filesystem", lambda *_, name=name: name)
        check_roots([good], MIB)
    assert not caplog.text


def _failing_mkstemp(number: int):
    def refuse(*_a, **_k):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_read_only_mount(good: Path, monkeypatch):
    monkeypatch.setattr("tempfile.mkstemp", _failing_mkstemp(errno.EROFS))
    assert f"{good} is mounted read-only: mount it for writing or use another directory" in refusal(good)


def test_a_directory_without_write_permission(good: Path, monkeypatch):
    monkeypatch.setattr("tempfile.mkstemp", _failing_mkstemp(errno.EACCES))
    assert f"{good} is not writable (Permission denied): check its permissions or use" in refusal(good)


def test_a_full_disk_is_not_called_read_only(good: Path, monkeypatch):
    real = os.pwritev

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(probe, "_free_bytes", lambda _: 0)
    assert f"{good} has 0B free, --histate-ssd-size 1.00MiB does not fit" in refusal(good)
    monkeypatch.setattr(os, "pwritev", real)


def test_no_room_names_both_numbers(good: Path, monkeypatch):
    monkeypatch.setattr(probe, "_free_bytes", lambda _: 3 * MIB)
    check_roots([good], 3 * MIB)
    text = refusal(good, size=4 * MIB)
    assert (
        f"--histate-ssd-dir {good} has 3.00MiB free, --histate-ssd-size 4.00MiB does not fit: free some"
        in text
    )


def test_a_root_without_room_for_its_share(tmp_path: Path, monkeypatch):
    """Two file systems of different sizes: each needs half."""
    small, large = tmp_path / "small", tmp_path / "large"
    for path in (small, large):
        path.mkdir(0o700)
    devices = {small: 1, large: 2}
    pretend_devices(monkeypatch, devices)
    monkeypatch.setattr(probe, "_free_bytes", lambda path: 2 * MIB if path == small else 100 * MIB)
    check_roots([small, large], 4 * MIB)
    text = refusal(small, large, size=6 * MIB)
    assert f"{small} has 2.00MiB free, its share 3.00MiB of --histate-ssd-size 6.00MiB does not fit" in text


def test_roots_on_one_file_system_share_its_room(tmp_path: Path, monkeypatch, caplog):
    a, b = tmp_path / "a", tmp_path / "b"
    monkeypatch.setattr(probe, "_free_bytes", lambda _: 4 * MIB)
    check_roots([a, b], 4 * MIB)
    assert f"{a} and {b} are on one file system" in caplog.text
    assert f"{a},{b} has 4.00MiB free, --histate-ssd-size 5.00MiB does not fit" in refusal(a, b, size=5 * MIB)
    caplog.clear()
    pretend_devices(monkeypatch, {a: 1, b: 2})
    check_roots([a, b], 4 * MIB)
    assert not caplog.text


def pretend_devices(monkeypatch, devices: dict[Path, int]) -> None:
    real = Path.stat

    def stat(self, **options):
        facts = real(self, **options)
        if self not in devices:
            return facts
        fields = list(facts)
        fields[2] = devices[self]
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)


def test_the_same_directory_twice(good: Path, tmp_path: Path):
    assert f"names {good} twice: give each directory once" in refusal(good, good)
    other = tmp_path / "sub"
    other.mkdir(0o700)
    roundabout = other / ".." / "good"
    text = refusal(good, roundabout)
    assert f"names {good} and {roundabout}, which are the same directory: give each directory once" in text


def test_too_small_for_two_checkpoints(good: Path):
    least = 4096 + 2 * SLAB
    text = refusal(good, size=least - 1, slab_bytes=SLAB)
    assert (
        "--histate-ssd-size" in text
        and f"too small for two checkpoints of this model: give at least 36.00KiB ({least} bytes)" in text
    )
    check_roots([good], least, slab_bytes=SLAB)


def test_too_small_for_one_checkpoint_in_each_root(tmp_path: Path):
    roots = [tmp_path / name for name in "abc"]
    least = 3 * (4096 + SLAB)
    text = refusal(*roots, size=least - 1, slab_bytes=SLAB)
    assert (
        f"too small for a checkpoint in each of 3 directories of this model: give at least 60.00KiB ({least} bytes)"
        in text
    )
    store = open_store(roots=roots, size_bytes=least)
    assert [root.slabs_total for root in store.stats().roots] == [1, 1, 1]
    store.close()


def test_a_file_that_another_process_holds_is_named_with_its_process(good: Path):
    open_store(roots=[good]).close()
    (file,) = good.glob("*/*/slabs.dat")
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        text = refusal(good, store_files=[file])
        pids = re.search(r"in use by another process \(pid (\d+)\): stop that process or", text)
        assert pids is not None and int(pids[1]) == holder.pid
        with pytest.raises(StoreError, match=f"pid {holder.pid}"):
            open_store(roots=[good])
        holder.stdin.close()
    check_roots([good], MIB, store_files=[file])


def test_a_store_that_fills_the_disk_can_be_opened_again(tmp_path: Path, monkeypatch):
    """Its own blocks are not free, but they are the ones that it will use."""
    file = tmp_path / "model" / "rank" / "slabs.dat"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * MIB)
    monkeypatch.setattr(probe, "_free_bytes", lambda _: 1 << 18)
    tmp_path.chmod(0o700)
    check_roots([tmp_path], MIB)
    check_roots([tmp_path], MIB, store_files=[file])
    assert "does not fit" in refusal(tmp_path, size=2 * MIB)


def test_one_bad_root_of_several_is_named(good: Path, tmp_path: Path):
    bad = tmp_path / "bad"
    bad.mkdir()
    bad.chmod(0o777)
    assert f"--histate-ssd-dir {bad} may be written" in refusal(good, bad)
    with pytest.raises(StoreError, match="may be written"):
        open_store(roots=[good, bad])
    bad.chmod(0o700)
    open_store(roots=[good, bad]).close()
