"""Looking at a store from outside: headers, verification beside a writer, locks, links, provisioning."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_histate.store import RecordKind, StoreError
from sglang_histate.store.holder import UNSEEN, lock_holder
from sglang_histate.store.private_files import open_below
from sglang_histate.store.provision import reserve, unwritten, wanted_bytes, write_zeros
from sglang_histate.store.survey import FileState, SlabFile, SlabState, survey
from sglang_histate.store.verify import Bad, Verification

from .conftest import LAYOUT, SLAB, open_store, put, put_extent, settle


def filled(root: Path, count: int = 3, slabs: int = 8):
    store = open_store(root, slabs=slabs, keep_unrestorable=True)
    for number in range(1, count + 1):
        put(store, number)
        put_extent(store, number, 2)
        settle(store)
    return store


def only(root: Path, flags: int = os.O_RDONLY) -> SlabFile:
    (path,) = survey(root).files
    return SlabFile.open(root, path, flags)


def damage(root: Path, slab: int, at: int, value: bytes = b"\xff") -> None:
    with only(root, os.O_RDWR) as file:
        os.pwrite(file.fd, value, LAYOUT.slab_offset(slab) + at)


def test_what_a_store_says_of_itself(root: Path) -> None:
    store = filled(root)
    store.close()
    with only(root) as file:
        assert file.state is FileState.STORE and file.layout == LAYOUT and file.slab_count == 8
        assert file.identity == {"model": "test"} and file.holder is None and not file.live
        assert file.name == f"{store.fingerprint.directory_name}/tp0of1-pp0of1"
        slabs = list(file.headers())
    kinds = [slab.header.kind for slab in slabs if slab.header is not None]
    assert kinds.count(RecordKind.CHECKPOINT) == kinds.count(RecordKind.KV) == 3
    assert [slab.number for slab in slabs] == list(range(8))


def test_an_identity_that_is_cut(root: Path) -> None:
    """Segments of one size are assumed then."""
    layout = type(LAYOUT)((4096,) * 3, kv_page_bytes=3000)
    store = open_store(root, fingerprint={"model": "x" * 9000}, layout=layout, size_bytes=1 << 20)
    put(store, 1)
    settle(store)
    store.close()
    with only(root) as file:
        assert file.identity is None and file.layout == layout
        assert Verification(file).run().sound == {RecordKind.CHECKPOINT: 1}


def test_other_things_are_named(root: Path) -> None:
    filled(root).close()
    (path,) = survey(root).files
    (root / "lost+found").mkdir()
    (root / "0123456789abcdef").symlink_to(path.parent.parent)
    (path.parent / "old.bak").touch()
    (path.parent.parent / "file").touch()
    found = survey(root)
    assert found.files == (path,)
    name = path.parent.parent.name
    assert set(found.strangers) == {
        "lost+found", "0123456789abcdef", f"{name}/file", f"{name}/tp0of1-pp0of1/old.bak",
    }  # fmt: skip
    with pytest.raises(StoreError, match="cannot be read"):
        survey(root / "none")


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (bytes(8192), FileState.EMPTY),
        (b"", FileState.EMPTY),
        (b"HISTATE\0\2\0\0\0" + bytes(9000), FileState.OTHER_VERSION),
        (b"HISTATE\0\3\0\0\0" + bytes(9000), FileState.DAMAGED),
        (b"something else" + bytes(9000), FileState.DAMAGED),
    ],
)
def test_files_that_are_no_store(root: Path, content: bytes, state: FileState) -> None:
    filled(root).close()
    (path,) = survey(root).files
    path.write_bytes(content)
    with only(root) as file:
        assert file.state is state and list(file.headers()) == [] and file.slab_count == 0
        with pytest.raises(StoreError, match="start the server on it once"):
            wanted_bytes(file, None)


def test_all_that_can_be_bad(root: Path) -> None:
    filled(root).close()
    with only(root) as file:
        assert Verification(file).run().bad == {}
    damage(root, 0, LAYOUT.header_bytes + 5200)  # second segment of a checkpoint
    damage(root, 1, LAYOUT.header_bytes + 3100)  # second page of an extent
    damage(root, 2, 40)  # a header
    damage(root, 3, 8, b"\7")  # another format version
    with only(root) as file:
        result = Verification(file).run()
    assert result.bad == {Bad.CORRUPT_SEGMENT: 1, Bad.CORRUPT_PAGE: 1, Bad.UNSOUND: 1}
    assert result.other_version == 1 and sum(result.sound.values()) == 2
    assert result.named == [(0, Bad.CORRUPT_SEGMENT), (1, Bad.CORRUPT_PAGE), (2, Bad.UNSOUND)]


def test_padding_is_not_verified_and_cleared_records_are_not_read(root: Path) -> None:
    store = filled(root)
    damage(root, 0, LAYOUT.header_bytes + LAYOUT.payload_bytes)
    damage(root, 1, LAYOUT.header_bytes)
    store.clear()
    put(store, 9)
    settle(store)
    store.close()
    with only(root) as file:
        result = Verification(file).run()
    assert result.bad == {} and result.expired == 5 and sum(result.sound.values()) == 1


def test_a_file_that_ends_early(root: Path) -> None:
    filled(root).close()
    (path,) = survey(root).files
    os.truncate(path, LAYOUT.slab_offset(2))
    with only(root) as file:
        assert file.slab_count == 2 and Verification(file).run().bad == {}


def test_the_rate_is_kept(root: Path) -> None:
    filled(root).close()
    waits: list[float] = []
    with only(root) as file:
        result = Verification(file, rate=10_000, sleep=waits.append).run()
    assert sum(waits) > 0 and waits[-1] == pytest.approx(result.read_bytes / 10_000, rel=0.1)


def test_a_record_that_is_being_written_is_looked_at_again(root: Path) -> None:
    store = filled(root)
    with only(root) as file:
        assert file.live and file.holder == os.getpid()
        where = LAYOUT.slab_offset(0) + LAYOUT.header_bytes
        writer = os.open(file.path, os.O_RDWR)
        right = os.pread(writer, 4, where)
        steps = iter([b"1234", b"5678", right])  # in three goes, as far as the verifier sees
        os.pwrite(writer, b"0000", where)

        def meanwhile(_: float) -> None:
            os.pwrite(writer, next(steps), where)

        result = Verification(file, sleep=meanwhile).run()
        assert result.bad == {} and sum(result.sound.values()) == 6 and result.unsettled == 0
        os.pwrite(writer, b"0000", where)
        result = Verification(file, sleep=lambda _: None).run()
        assert result.bad == {Bad.CORRUPT_SEGMENT: 1}, "nothing changes it: it is bad"
        os.close(writer)
    store.close()


def test_beside_a_store_that_writes_all_the_time(root: Path) -> None:
    store = filled(root, count=2, slabs=6)
    stop = threading.Event()
    failures: list[object] = []

    def look() -> None:
        while not stop.is_set():
            with only(root) as file:
                failures.extend(Verification(file, sleep=lambda _: stop.wait(0.005)).run().named)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(10, 300):
        put(store, number)
        put_extent(store, number, 1 + number % 4)
        settle(store)
    stop.set()
    thread.join()
    store.close()
    assert failures == []


def test_who_holds_the_lock(root: Path, tmp_path: Path) -> None:
    filled(root).close()
    (path,) = survey(root).files
    code = (
        "import fcntl, sys, time\nfile = open(sys.argv[1], 'r+')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with only(root) as file:
            assert file.holder == child.pid
            assert lock_holder(file.fd, tmp_path / "none") == UNSEEN  # in another process namespace
    finally:
        child.kill()
        child.wait()
    with only(root) as file:
        assert file.holder is None and lock_holder(file.fd, tmp_path / "none") is None


def test_looking_does_not_keep_a_server_out(root: Path) -> None:
    filled(root).close()
    with only(root) as file:
        open_store(root, slabs=8).close()
        # Caught in the moment of looking.
        fcntl.flock(file.fd, fcntl.LOCK_SH)
        threading.Timer(0.01, fcntl.flock, (file.fd, fcntl.LOCK_UN)).start()
        open_store(root, slabs=8).close()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_links_below_the_root_are_refused(root: Path, tmp_path: Path, depth: int) -> None:
    store = filled(root)
    store.close()
    (path,) = survey(root).files
    at = (path.parent.parent, path.parent, path)[depth]
    away = tmp_path / "away"
    at.rename(away)
    at.symlink_to(away)
    with pytest.raises(StoreError, match="symbolic link"):
        open_below(root, path, os.O_RDONLY)
    assert survey(root).files == ((path,) if depth == 2 else ())
    with pytest.raises(StoreError, match=r"symbolic link|must be a directory"):
        open_store(root, slabs=8)
    assert away.exists()


def test_a_root_that_is_a_link_is_the_operators_business(root: Path, tmp_path: Path) -> None:
    filled(root).close()
    (tmp_path / "mount").symlink_to(root)
    with only(tmp_path / "mount") as file:
        assert file.state is FileState.STORE


def test_what_is_no_file_is_refused_and_does_not_hang(root: Path) -> None:
    filled(root).close()
    (path,) = survey(root).files
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        open_below(root, path, os.O_RDONLY)


def test_foreign_files_are_refused(root: Path, monkeypatch) -> None:
    filled(root).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(StoreError, match="run as that user"):
        only(root)


def test_provisioning_writes_what_was_never_written_and_nothing_else(root: Path) -> None:
    filled(root).close()
    (path,) = survey(root).files
    before = path.read_bytes()
    with only(root, os.O_RDWR) as file:
        size = wanted_bytes(file, 4096 + 64 * SLAB)
        reserve(file, size)
        gaps = list(unwritten(file.fd, size))
        if not gaps:
            pytest.skip("this file system does not tell what was never written")
        for offset, count in gaps:
            write_zeros(file.fd, offset, count, lambda _: None)
        assert list(unwritten(file.fd, size)) == []
    assert path.stat().st_size == 4096 + 64 * SLAB and path.read_bytes()[: len(before)] == before
    again = open_store(root, slabs=64, keep_unrestorable=True)
    assert again.stats().entries == 6
    with only(root, os.O_RDWR) as file, pytest.raises(StoreError, match="in use by another process"):
        reserve(file, size)
    again.close()
    with only(root) as file, pytest.raises(StoreError, match="larger than that already"):
        wanted_bytes(file, 4096 + 8 * SLAB)


def test_slab_states(root: Path) -> None:
    filled(root, count=1).close()
    damage(root, 1, 120)  # the fingerprint's half: the sum of the header does not fit any more
    with only(root) as file:
        states = [slab.state for slab in file.headers()]
    assert states == [SlabState.RECORD, SlabState.UNSOUND] + [SlabState.EMPTY] * 6
