"""`histate store`: what each action prints, its exit code, and that it leaves alone what is not its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sglang_histate.cli import main
from sglang_histate.store import RecordKind, namespace_of
from sglang_histate.store.survey import SlabFile, survey
from tests.store.conftest import LAYOUT, open_store
from tests.store.test_purge import filled

ONE = namespace_of(None, "one")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["store", *argv])
    done = capsys.readouterr()
    assert "Traceback" not in done.err and all(line.startswith("histate: ") for line in done.err.splitlines())
    return code, done.out, done.err


def slabs(root: Path) -> Path:
    (path,) = survey(root).files
    return path


def names(root: Path) -> set[bytes]:
    with SlabFile.open(root, slabs(root)) as file:
        return {slab.header.key for slab in file.headers() if slab.header is not None}


class Server:
    """Answers what a server would, by purging `store` on its own thread."""

    def __init__(self, store, answer: dict | None = None, status: int = 200) -> None:
        seen = self.seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                seen.append((self.path, body, self.headers.get("Authorization")))
                name = body.get("namespace")
                dropped = store.purge(None if name is None else bytes.fromhex(name)) if status == 200 else 0
                found = {"ssd_entries": dropped, "nodes": 0, "in_use": 0, "erased": True} | (answer or {})
                self._answer(found)

            def do_GET(self) -> None:
                seen.append((self.path, None, self.headers.get("Authorization")))
                self._answer(answer or {})

            def _answer(self, found: dict) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_) -> None: ...

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.mark.parametrize("action", ["inspect", "verify", "purge", "provision", "stats"])
def test_help_has_an_example_and_the_exit_codes(action: str, capsys) -> None:
    code, out, _ = run(capsys, action, "--help")
    assert code == 0 and f"histate store {action} --ssd-dir" in out and "exit codes: 0" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["inspect"],
        ["inspect", "--ssd-dir", ""],
        ["inspect", "--ssd-dir", "a,a"],
        ["verify", "--ssd-dir", "a", "--rate", "fast"],
        ["verify", "--ssd-dir", "a", "--rate", "0"],
        ["provision", "--ssd-dir", "a", "--size", "1GB"],
        ["provision", "--ssd-dir", "a,b", "--like", "c", "--size", "1GiB"],
    ],
)
def test_bad_usage_is_2(argv: list[str], capsys) -> None:
    assert main(["store", *argv]) == 2


@pytest.mark.parametrize("action", ["inspect", "verify", "stats", "purge", "provision"])
def test_a_directory_that_is_none_is_one_sentence(action: str, tmp_path: Path, capsys) -> None:
    code, _, err = run(capsys, action, "--ssd-dir", str(tmp_path / "none"))
    assert code == 1 and err.count("\n") == 1 and "cannot be read" in err


def test_neither_torch_nor_sglang_is_imported(root: Path) -> None:
    filled(root=root).close()
    code = (
        "import sys; from sglang_histate.cli import main\n"
        "for action in ('inspect', 'verify', 'stats', 'provision', 'purge'):\n"
        f"    assert main(['store', action, '--ssd-dir', {str(root)!r}]) == 0, action\n"
        "sys.exit(len({'torch', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_inspect(root: Path, capsys) -> None:
    store = filled(root=root)
    code, out, _ = run(capsys, "inspect", "--ssd-dir", str(root))
    assert code == 0 and f"open, process {os.getpid()}" in out
    store.close()
    (root / "mine").mkdir()
    code, out, _ = run(capsys, "inspect", "--ssd-dir", str(root))
    assert code == 0
    for part in (
        "closed in order", "format     3, epoch 1", "identity   model test", "8 of 16", "4 checkpoint", "4 kv",
        "2; 2 entries without salt or extra key", "snapshot   used, 8 names", "left alone: mine",
    ):  # fmt: skip
        assert part in out, part


def test_inspect_as_json_of_several_directories(root: Path, tmp_path: Path, capsys) -> None:
    filled(root=root).close()
    (tmp_path / "other").mkdir()
    code, out, _ = run(capsys, "inspect", "--ssd-dir", f"{root},{tmp_path / 'other'}", "--json")
    first, second = json.loads(out)["roots"]
    (store,) = first["stores"]
    assert code == 0 and second["stores"] == []
    assert store["entries"] == {"checkpoint": 4, "kv": 4} and store["holder_pid"] is None
    assert store["identity"] == {"model": "test"} and store["slabs_by_state"]["record"] == 8
    assert store["bytes_used"] == 8 * LAYOUT.slab_bytes and store["tenants"] == 2


def test_another_format_version_is_named_and_never_touched(root: Path, capsys) -> None:
    filled(root=root).close()
    content = bytearray(slabs(root).read_bytes())
    content[8] = 2
    slabs(root).write_bytes(content)
    assert "of format 2: left alone" in run(capsys, "inspect", "--ssd-dir", str(root))[1]
    assert run(capsys, "verify", "--ssd-dir", str(root))[0] == 0
    assert run(capsys, "stats", "--ssd-dir", str(root))[0] == 0
    for argv in (["purge"], ["purge", "--salt", "one"], ["provision", "--size", "1MiB", "--zero"]):
        code, _, err = run(capsys, *argv, "--ssd-dir", str(root))
        assert code == 1 and err
    assert slabs(root).read_bytes() == bytes(content)


def test_verify(root: Path, capsys) -> None:
    store = filled(root=root)
    code, out, _ = run(capsys, "verify", "--ssd-dir", str(root), "--rate", "1GiB")
    assert code == 0 and "sound      4 checkpoint, 4 kv" in out and "beside a server" in out
    store.close()
    with slabs(root).open("r+b") as file:
        file.seek(LAYOUT.slab_offset(0) + LAYOUT.header_bytes + 17)
        file.write(b"\1")
    code, out, _ = run(capsys, "verify", "--ssd-dir", str(root))
    assert code == 1 and "bad        1 corrupt_segment" in out and "slab 0: corrupt_segment" in out
    code, out, _ = run(capsys, "verify", "--ssd-dir", str(root), "--json")
    (found,) = json.loads(out)["stores"]
    assert code == 1 and found["bad"] == {"corrupt_segment": 1} and found["sound"]["kv"] == 4


@pytest.mark.parametrize(
    ("name", "at", "reason"), [("slabs.dat", 20, "superblock"), ("stats.snap", 50, "snapshot")]
)
def test_verify_checks_the_other_sums_too(root: Path, capsys, name: str, at: int, reason: str) -> None:
    filled(root=root).close()
    with slabs(root).with_name(name).open("r+b") as file:
        file.seek(at)
        file.write(b"\xee")
    code, out, _ = run(capsys, "verify", "--ssd-dir", str(root), "--json")
    assert code == 1 and json.loads(out)["stores"][0]["bad"] == {reason: 1}


def test_purge_of_one_tenant_and_of_all(root: Path, capsys) -> None:
    filled(root=root).close()
    before = names(root)
    code, out, _ = run(capsys, "purge", "--ssd-dir", str(root), "--salt", "nobody")
    assert code == 0 and "0 records erased" in out and names(root) == before
    code, out, _ = run(capsys, "purge", "--ssd-dir", str(root), "--extra-key", "one")
    assert "0 records erased" in out, "an extra key is no salt"
    code, out, _ = run(capsys, "purge", "--ssd-dir", str(root), "--salt", "one", "--overwrite")
    assert code == 0 and "4 records erased" in out and len(names(root)) == 2
    code, out, _ = run(capsys, "purge", "--ssd-dir", str(root), "--salt", "")
    assert code == 0 and "2 records erased" in out, "what has neither salt nor extra key"
    code, out, _ = run(capsys, "purge", "--ssd-dir", str(root))
    assert code == 0 and "2 records erased, file removed" in out and list(root.iterdir()) == []


def test_purge_of_an_open_store_goes_through_its_server(root: Path, capsys, monkeypatch) -> None:
    store = filled(root=root)
    code, _, err = run(capsys, "purge", "--ssd-dir", str(root), "--salt", "one")
    assert code == 1 and f"is open (process {os.getpid()}): give --url" in err
    monkeypatch.setenv("HISTATE_ADMIN_API_KEY", "secret")
    with Server(store) as server:
        argv = ["purge", "--ssd-dir", str(root), "--url", server.url]
        code, _, err = run(capsys, *argv, "--overwrite")
        assert code == 1 and "--overwrite needs it closed" in err and server.seen == []
        code, out, err = run(capsys, *argv, "--salt", "one")
        assert (code, err) == (0, "") and "4 entries of the SSD" in out and "slabs.dat: erased" in out
        assert server.seen == [("/histate/purge", {"namespace": ONE.hex()}, "Bearer secret")]
        assert len(names(root)) == 2
        code, out, _ = run(capsys, *argv)
        assert code == 0 and server.seen[1][1] == {"all": True} and not names(root)
    store.close()


def test_a_server_that_does_not_do_it(root: Path, capsys, monkeypatch) -> None:
    store = filled(root=root)
    monkeypatch.setattr("sglang_histate.cli.store.purge._WAIT_S", 0.1)
    argv = ["purge", "--ssd-dir", str(root), "--salt", "one", "--url"]
    with Server(store, status=401) as server:
        code, _, err = run(capsys, *argv, server.url)
        assert code == 1 and "refuses the key" in err and "HISTATE_ADMIN_API_KEY" in err
    with Server(store, status=500) as server:
        code, _, err = run(capsys, *argv, server.url)
        assert code == 1 and "answered 500" in err
    other = open_store(root, rank_name="other")
    with Server(other, {"in_use": 3}) as server:
        code, _, err = run(capsys, *argv, server.url)
        assert code == 1 and "3 nodes in memory are in use" in err and "still has 4 records" in err
    code, _, err = run(capsys, *argv, "http://127.0.0.1:1")
    assert code == 1 and "cannot be asked" in err
    other.close()
    store.close()


def test_provision(root: Path, tmp_path: Path, capsys) -> None:
    root.mkdir()
    code, _, err = run(capsys, "provision", "--ssd-dir", str(root), "--size", "1MiB")
    assert code == 1 and "start the server on it once" in err
    store = filled(root=root)
    code, _, err = run(capsys, "provision", "--ssd-dir", str(root), "--zero")
    assert code == 1 and "in use by another process" in err
    store.close()
    before = names(root)
    code, out, _ = run(capsys, "provision", "--ssd-dir", str(root), "--size", "1MiB", "--zero")
    size = LAYOUT.file_bytes(LAYOUT.slab_count(1 << 20))
    assert code == 0 and "reserved" in out and slabs(root).stat().st_size == size and names(root) == before
    code, out, _ = run(capsys, "provision", "--ssd-dir", str(root), "--zero")
    assert code == 0 and "0B written" in out, "nothing is left to write"
    code, _, err = run(capsys, "provision", "--ssd-dir", str(root), "--size", "512KiB")
    assert code == 1 and "larger than that already" in err


def test_two_directories_share_the_size_as_the_servers_do(tmp_path: Path, capsys) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    small, large = 2 * 4096 + 5 * LAYOUT.slab_bytes, 2 * 4096 + 41 * LAYOUT.slab_bytes
    open_store(roots=roots, size_bytes=small).close()
    both = ",".join(map(str, roots))
    code, _, err = run(capsys, "provision", "--ssd-dir", both, "--size", f"{large // 1024}KiB", "--zero")
    assert (code, err) == (0, "")
    provisioned = [slabs(root).stat().st_size for root in roots]
    store = open_store(roots=roots, size_bytes=large)
    assert [slabs(root).stat().st_size for root in roots] == provisioned
    assert provisioned[0] - provisioned[1] == LAYOUT.slab_bytes, "41 slabs: 21 and 20"
    store.close()


def test_provision_like_another(root: Path, tmp_path: Path, capsys) -> None:
    filled(root=root).close()
    new = tmp_path / "new"
    new.mkdir(mode=0o700)
    argv = ["provision", "--ssd-dir", str(new), "--like", str(root), "--size", "1MiB", "--zero"]
    assert run(capsys, *argv)[0] == 0
    assert slabs(new).relative_to(new) == slabs(root).relative_to(root) and not names(new)
    store = open_store(new, slabs=LAYOUT.slab_count(1 << 20))
    assert store.recovery.losses == {} and store.recovery.clean
    store.close()


def test_stats(root: Path, capsys) -> None:
    store = filled(root=root)
    code, out, _ = run(capsys, "stats", "--ssd-dir", str(root))
    assert code == 0 and "checkpoint         4 entries" in out and "< 1 min            8 ####" in out
    store.close()
    ssd = {"entries": 7, "checkpoints": {"used_bytes": 1, "total_bytes": 2}}
    counters = {"ssd_reads_total": 5, "ssd_entries_dropped_total": {}, "ssd_read_misses_total": {"absent": 1}}
    with Server(None, {"enabled": True, "tiers": {"ssd": ssd}, "counters": counters}) as server:
        code, out, _ = run(capsys, "stats", "--ssd-dir", str(root), "--url", server.url, "--json")
        found = json.loads(out)
    assert code == 0 and server.seen[0][0] == "/histate/status"
    assert found["server"]["entries"] == 7 and found["server"]["misses"] == {"absent": 1}
    assert found["stores"][0]["ages"]["1 min"] == 8
    with Server(None, {"enabled": False}) as server:
        code, _, err = run(capsys, "stats", "--ssd-dir", str(root), "--url", server.url)
        assert code == 1 and "serves without HiState" in err


def test_links_and_foreign_files_are_refused(root: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    filled(root=root).close()
    target = tmp_path / "target"
    slabs(root).rename(target)
    content = target.read_bytes()
    path = root / next(root.iterdir()).name / "tp0of1-pp0of1" / "slabs.dat"
    path.symlink_to(target)
    for argv in (
        ["inspect"],
        ["verify"],
        ["purge"],
        ["purge", "--salt", "one"],
        ["provision", "--zero"],
        ["stats"],
    ):
        code, _, err = run(capsys, *argv, "--ssd-dir", str(root))
        assert code == 1 and "symbolic link" in err, argv
    assert target.read_bytes() == content and path.is_symlink()
    path.unlink()
    target.rename(path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    for argv in (["inspect"], ["verify"], ["purge"], ["provision"]):
        code, _, err = run(capsys, *argv, "--ssd-dir", str(root))
        assert code == 1 and "belongs to user" in err, argv


def test_every_action_is_in_the_manual() -> None:
    from sglang_histate.cli.store import ACTIONS

    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for action in ACTIONS:
        assert f"| `{action.__name__.rpartition('.')[2]}` |" in manual


def test_kinds_are_spelled_as_in_the_status() -> None:
    assert [kind.value for kind in RecordKind] == ["checkpoint", "kv"]
