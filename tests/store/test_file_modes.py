"""Who can read what: 0700 and 0600 whatever the umask is, no link is followed, nothing is left open to a child."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_histate.cli import main
from sglang_histate.store import StoreError
from sglang_histate.store.private_files import read_own
from sglang_histate.store.quarantine import QUARANTINE_FILE, Quarantine, read_quarantine, write_quarantine
from sglang_histate.store.snapshot import SNAPSHOT_FILE, SnapshotFile, SnapshotState
from sglang_histate.store.survey import survey

from .conftest import open_store, put, settle
from .test_purge import filled


@pytest.fixture(params=[0, 0o077, 0o777], ids=oct)
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def wrong_modes(root: Path) -> list[str]:
    """Return everything below and with `root` that others can read."""
    wrong = []
    for path in [root, *root.rglob("*")]:
        facts = path.lstat()
        wanted = 0o700 if stat.S_ISDIR(facts.st_mode) else 0o600
        if stat.S_IMODE(facts.st_mode) != wanted:
            wrong.append(f"{path.relative_to(root.parent)} {stat.S_IMODE(facts.st_mode):04o}")
    return wrong


def test_everything_that_is_made_is_private(root: Path, tmp_path: Path, umask: int) -> None:
    store = filled(root=root)
    assert wrong_modes(root) == []
    store.close()
    (slabs,) = survey(root).files
    write_quarantine(slabs.with_name(QUARANTINE_FILE), Quarantine(0.0, "a test"))
    assert {path.name for path in slabs.parent.iterdir()} == {"slabs.dat", SNAPSHOT_FILE, QUARANTINE_FILE}
    assert wrong_modes(root) == []
    assert main(["store", "purge", "--ssd-dir", str(root), "--salt", "one"]) == 0
    new = tmp_path / "new"
    argv = ["store", "provision", "--ssd-dir", str(root), "--size", "1MiB", "--zero"]
    assert main(argv) == 0
    new.mkdir()
    new.chmod(0o700)
    argv = ["store", "provision", "--ssd-dir", str(new), "--like", str(root), "--size", "1MiB"]
    assert main(argv) == 0 and survey(new).files
    assert wrong_modes(root) == [] and wrong_modes(new) == []


def test_what_was_open_to_others_is_closed(root: Path) -> None:
    filled(root=root).close()
    (slabs,) = survey(root).files
    for path, mode in ((slabs.parent.parent, 0o755), (slabs.parent, 0o711), (slabs, 0o644)):
        path.chmod(mode)
    open_store(root, slabs=16).close()
    assert wrong_modes(root) == []


@pytest.mark.parametrize("depth", [0, 1])
def test_directories_that_others_can_write_are_refused(root: Path, depth: int) -> None:
    filled(root=root).close()
    (slabs,) = survey(root).files
    (slabs.parent.parent, slabs.parent)[depth].chmod(0o770)
    with pytest.raises(StoreError, match="no one else can write"):
        open_store(root, slabs=16)


def test_a_snapshot_that_is_a_link_is_neither_read_nor_written_through(root: Path, tmp_path: Path) -> None:
    store = filled(root=root)
    store.close()
    (slabs,) = survey(root).files
    elsewhere = tmp_path / "elsewhere"
    for name in (SNAPSHOT_FILE, SNAPSHOT_FILE + ".tmp"):
        path = slabs.with_name(name)
        path.unlink(missing_ok=True)
        elsewhere.write_bytes(b"not ours")
        path.symlink_to(elsewhere)
        again = open_store(root, slabs=16)
        put(again, 77)
        settle(again)
        again.close()
        assert elsewhere.read_bytes() == b"not ours" and not path.is_symlink()
    file = SnapshotFile(slabs.with_name(SNAPSHOT_FILE))
    slabs.with_name(SNAPSHOT_FILE + ".tmp").symlink_to(elsewhere)
    with pytest.raises(OSError):
        file.replace(b"new")
    assert elsewhere.read_bytes() == b"not ours"


def test_small_files_of_somebody_else_are_not_read(root: Path, tmp_path: Path, monkeypatch) -> None:
    filled(root=root).close()
    (slabs,) = survey(root).files
    note = slabs.with_name(QUARANTINE_FILE)
    note.symlink_to(tmp_path / "none")
    found = read_quarantine(note)
    assert found is not None and "cannot be read" in found.why, "what cannot be read counts as a note"
    note.unlink()
    os.mkfifo(note)
    with pytest.raises(PermissionError):
        read_own(note)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    state = SnapshotFile(slabs.with_name(SNAPSHOT_FILE)).load(None)  # type: ignore[arg-type]
    assert state is SnapshotState.UNREADABLE


def test_a_child_gets_no_file_of_the_store(root: Path) -> None:
    store = filled(root=root)
    open_fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd).startswith(str(root))]
    assert open_fds and not any(os.get_inheritable(fd) for fd in open_fds)
    store.close()


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
