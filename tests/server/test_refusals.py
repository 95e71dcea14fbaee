"""What HiState refuses to start with: exit code 2, one sentence that names the flag, no traceback."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.servers import Server, ServerFailed
from sglang_histate import launch_server
from sglang_histate.demo.config import model_config
from sglang_histate.launch_server import prepare

from .conftest import ENVIRON, HOST_SIZE, MAIN, Servers
from .refusal_cases import CASES, WOULD_SERVE, Case

pytestmark = pytest.mark.server

EXIT_CODE = 2
Check = Callable[..., None]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check that the launcher refuses a command line without becoming the server process."""

    def check(arguments: list[str], *names: str) -> None:
        def serve(*_: object) -> None:
            pytest.fail("the launcher went on to serve")

        monkeypatch.setattr(os, "execve", serve)
        code = launch_server.main(arguments)
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        assert_refused(code, output.err, *names)

    return check


def launch(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_histate.launch_server", *arguments],
        env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def assert_refused(code: object, output: str, *names: str) -> None:
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output[-3000:]
    assert code == EXIT_CODE, output[-3000:]
    assert "Traceback" not in output
    for name in names:
        assert name in errors[0], errors[0]


# Refused by the launcher, before anything heavy is imported.

SIZE, INFLIGHT, HOST = "--histate-ssd-size", "--histate-inflight-size", "--histate-host-size"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((SIZE, "12"), SIZE),
        ((SIZE, "64MB"), SIZE),
        ((SIZE, "-1GiB"), SIZE),
        ((SIZE, "0"), SIZE),
        ((SIZE, "512KiB"), SIZE),
        ((SIZE, "100000TiB"), SIZE),
        ((SIZE,), SIZE),
        ((HOST, "lots"), HOST),
        ((HOST, "0"), HOST),
        ((HOST, "16MiB", INFLIGHT, "16MiB"), HOST),
        ((HOST, "100000TiB"), HOST),
        ((HOST, "2GiB", "--hicache-size", "1"), "--hicache-size"),
        ((HOST, "2GiB", "--hicache-ratio=3"), "--hicache-ratio"),
        ((INFLIGHT, "lots"), INFLIGHT),
        ((INFLIGHT, "1KiB"), INFLIGHT),
        (("--histate-interval", "sometimes"), "--histate-interval"),
        (("--histate-interval", "fixed:100"), "--histate-interval"),
        (("--histate-interval", "fixed:0"), "--histate-interval"),
        (("--histate-interval=fixed:"), "--histate-interval"),
        (("--histate-intervals", "512,256"), "--histate-intervals"),
        (("--histate-intervals", ""), "--histate-intervals"),
        (("--histate-intervals", "64,100"), "--histate-intervals"),
        (("--histate-read-threads", "0"), "--histate-read-threads"),
        (("--histate-read-threads", "many"), "--histate-read-threads"),
        (("--histate-ssd-write-rate", "fast"), "--histate-ssd-write-rate"),
        (("--histate-ssd-daily-writes", "1KiB"), "--histate-ssd-daily-writes"),
        (("--histate-write-queue-age", "0"), "--histate-write-queue-age"),
        (("--histate-min-gain", "-5"), "--histate-min-gain"),
        (("--histate-verify-rate", "2"), "--histate-verify-rate"),
        (("--histate-ssd-sise", "1GiB"), "--histate-ssd-sise"),
        (("--disable-histate=yes",), "--disable-histate"),
    ],
)
def test_values(tmp_path: Path, refused: Check, arguments: tuple[str, ...] | str, name: str) -> None:
    given = (arguments,) if isinstance(arguments, str) else arguments
    refused(["--demo", "--histate-ssd-dir", str(tmp_path / "ssd"), *given], name)


def test_no_directory_in_a_process_of_its_own() -> None:
    ended = launch("--demo")
    assert_refused(ended.returncode, ended.stderr, "--histate-ssd-dir", "--disable-histate")
    assert ended.stderr.count("\n") == 1 and ended.stdout == ""


def test_a_policy_log_that_cannot_be_written(tmp_path: Path, refused: Check) -> None:
    for name in (tmp_path, tmp_path / "a" / "log", Path("/sys/log")):
        refused(
            [
                "--demo",
                "--histate-ssd-dir",
                str(tmp_path / "ssd"),
                SIZE,
                "1MiB",
                "--histate-policy-log",
                str(name),
            ],
            "--histate-policy-log",
            str(name),
        )


def test_missing_parent(tmp_path: Path, refused: Check) -> None:
    refused(
        ["--demo", "--histate-ssd-dir", str(tmp_path / "a" / "b")], "--histate-ssd-dir", str(tmp_path / "a")
    )
    assert not (tmp_path / "a").exists()


def test_file_instead_of_directory(tmp_path: Path, refused: Check) -> None:
    (tmp_path / "file").write_text("precious")
    refused(["--demo", "--histate-ssd-dir", str(tmp_path / "file")], "--histate-ssd-dir")
    assert (tmp_path / "file").read_text() == "precious"


def test_read_only_directory(tmp_path: Path, refused: Check) -> None:
    folder = tmp_path / "ssd"
    folder.mkdir(mode=0o500)
    if os.access(
        folder, os.W_OK
    ):  # permissions do not bind this user: take a file system that cannot be written
        folder = Path("/sys")
    refused(["--demo", "--histate-ssd-dir", str(folder), SIZE, "1MiB"], "--histate-ssd-dir", "not writable")


def test_directory_that_others_may_write(tmp_path: Path, refused: Check) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd").chmod(0o777)
    refused(["--demo", "--histate-ssd-dir", str(tmp_path / "ssd")], "--histate-ssd-dir", "chmod")


def test_wrong_sglang(tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "sglang-0.5.22.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    ended = launch(
        "--demo", "--histate-ssd-dir", str(tmp_path / "ssd"), SIZE, "1MiB",
        environ={"PYTHONPATH": f"{tmp_path / 'site'}:{os.getcwd()}"},
    )  # fmt: skip
    assert_refused(ended.returncode, ended.stderr, "sglang 0.5.22", "0.5.23")


# Refused by the checks on SGLang's own arguments and on the model.


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run every case of refusal_cases through the server's checks in one process; answers by case name."""
    folder = tmp_path_factory.mktemp("refusals")
    requests, env = [], dict(os.environ)
    for case in CASES:
        arguments = ["--histate-ssd-dir", str(folder / "ssd"), SIZE, "1MiB", *case.arguments]
        if case.config is None:
            arguments.append("--demo")
        else:
            model = folder / case.name
            model.mkdir()
            (model / "config.json").write_text(_config_json(case.config))
            arguments += ["--model-path", str(model)]
        command, env = prepare(arguments, os.environ)
        requests.append({"argv": command, "environ": dict(case.environ)})
    driver = Path(__file__).with_name("refusal_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver)],
        env=env,
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "ANSWERS " in done.stdout, done.stderr[-3000:]
    answers = json.loads(done.stdout.rpartition("ANSWERS ")[2])
    return {case.name: answer for case, answer in zip(CASES, answers, strict=True)}


_SMALL = {
    name: value for name, value in model_config().items() if name not in ("architectures", "model_type")
}


def _config_json(entries: dict[str, Any]) -> str:
    merged = {**_SMALL, **entries}
    return json.dumps({name: value for name, value in merged.items() if value is not None})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_and_models(checked: dict[str, dict[str, Any]], case: Case) -> None:
    answer = checked[case.name]
    if case.serves:
        assert answer["code"] == WOULD_SERVE, answer["output"][-3000:]
        return
    assert_refused(answer["code"], answer["output"], *case.names)


# Through the launcher and, where only a scheduler can tell, all the way into it.


def test_pure_attention_through_the_launcher(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "pure-attention"]
    (tmp_path / "config.json").write_text(_config_json(case.config or {}))
    ended = launch(
        "--model-path",
        str(tmp_path),
        "--histate-ssd-dir",
        str(tmp_path / "ssd"),
        SIZE,
        "1MiB",
        environ=ENVIRON,
    )
    assert_refused(ended.returncode, ended.stdout + ended.stderr, "--model-path", "Qwen3ForCausalLM")


def test_too_little_host_memory_for_this_model(tmp_path: Path) -> None:
    arguments = ["--demo", "--histate-ssd-dir", str(tmp_path / "ssd"), SIZE, "1MiB", INFLIGHT, "1MiB"]
    server = Server([*arguments, HOST, "1060KiB"], tmp_path / "small.log", ENVIRON)
    try:
        with pytest.raises(ServerFailed):
            server.wait_ready()
        assert_refused(
            server.process.returncode,
            server.log_file.read_text(),
            f"{HOST} 1.04MiB is too small: a rank needs",
            INFLIGHT,
        )
    finally:
        server.stop()


def test_second_server_on_the_same_directory(main: Server, servers: Servers, tmp_path: Path) -> None:
    # Its own identity has to be the same, or it would use another file below the same directory.
    arguments = [
        "--demo",
        *MAIN.arguments,
        "--histate-ssd-dir",
        str(servers.ssd_dir(MAIN)),
        *MAIN.sizes,
        *HOST_SIZE,
    ]
    second = Server(arguments, tmp_path / "second.log", ENVIRON)
    try:
        with pytest.raises(ServerFailed):
            second.wait_ready()
        assert_refused(
            second.process.returncode, second.log_file.read_text(), "--histate-ssd-dir", "another process"
        )
    finally:
        second.stop()
    assert main.generate([40] * 70, 2)["output_ids"]


def test_files_are_private(main: Server, servers: Servers) -> None:
    folder = servers.ssd_dir(MAIN)
    for path in [folder, *folder.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
