"""The launcher: what it passes on, what it decides by itself, and how it refuses. No server is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_histate import launch_server
from sglang_histate.config import FLAG_DEFAULTS, ConfigError, flag_name
from sglang_histate.launch_server import EXIT_CODE, main, prepare, with_defaults
from sglang_histate.store.reasons import StoreError
from sglang_histate.upstream import Overlay


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with or without a GPU, whose overlay is named after its groups; the directory is not looked at."""

    def choose(gpu: bool) -> list:
        asked: list = []

        def build(groups) -> Overlay:
            asked.append(tuple(groups))
            return Overlay(tmp_path / "-".join(groups) if groups else None, tuple(groups), (), None)

        monkeypatch.setattr(launch_server, "gpu_present", lambda: gpu)
        monkeypatch.setattr(launch_server, "build_overlay", build)
        monkeypatch.setattr(launch_server, "check_roots", lambda *_, **__: None)
        return asked

    return choose


def value(command: list[str], flag: str) -> str | None:
    places = [i for i, argument in enumerate(command) if argument == flag]
    assert len(places) <= 1, f"{flag} is given twice: {command}"
    return command[places[0] + 1] if places else None


def test_histate_on_a_gpu(machine) -> None:
    asked = machine(True)
    command, env = prepare(["--model-path", "m", "--histate-ssd-dir", "/ssd"], {"HOME": "/h"})
    assert asked == [("histate",)] and env["HISTATE_GROUPS"] == "histate" and env["HOME"] == "/h"
    assert env["PYTHONPATH"] == env["HISTATE_OVERLAY"]
    assert value(command, "--model-path") == "m" and value(command, "--histate-ssd-dir") == "/ssd"
    assert value(command, "--radix-cache-backend") == "histate" and value(command, "--page-size") == "64"
    assert "--enable-hierarchical-cache" in command and "--device" not in command
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_histate_on_the_cpu(machine) -> None:
    asked = machine(False)
    command, env = prepare(["--model-path", "m", "--histate-ssd-dir=/ssd"], {})
    assert asked == [("cpu", "histate")] and env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert value(command, "--device") == "cpu" and value(command, "--attention-backend") == "torch_native"
    assert value(command, "--histate-ssd-dir") == "/ssd"


def test_metrics_unless_they_are_switched_off(machine) -> None:
    machine(True)
    histate = ["--model-path", "m", "--histate-ssd-dir", "/ssd"]
    assert "--enable-metrics" in prepare(histate, {})[0]
    assert prepare([*histate, "--enable-metrics"], {})[0].count("--enable-metrics") == 1
    assert "--enable-metrics" not in prepare([*histate, "--no-histate-metrics"], {})[0]
    both, _ = prepare([*histate, "--no-histate-metrics", "--enable-metrics"], {})
    assert {"--enable-metrics", "--no-histate-metrics"} <= set(both)
    assert "--enable-metrics" not in prepare(["--model-path", "m", "--disable-histate"], {})[0]


@pytest.mark.parametrize("gpu", [True, False])
def test_one_device_pool_unless_a_fixed_split_is_asked_for(machine, gpu) -> None:
    machine(gpu)
    command, _ = prepare(["--model-path", "m", "--histate-ssd-dir", "/ssd"], {})
    assert command.count("--enable-unified-memory") == 1 and "--histate-static-split" not in command
    command, _ = prepare(["--model-path", "m", "--histate-ssd-dir", "/ssd", "--enable-unified-memory"], {})
    assert command.count("--enable-unified-memory") == 1
    command, _ = prepare(["--model-path", "m", "--histate-static-split", "--histate-ssd-dir", "/ssd"], {})
    assert "--enable-unified-memory" not in command
    assert command[command.index("--histate-static-split") + 1].startswith("--")
    command, _ = prepare(["--model-path", "m", "--disable-histate", "--histate-static-split"], {})
    assert not {"--enable-unified-memory", "--histate-static-split"} & set(command)


@pytest.mark.parametrize("gpu", [True, False])
def test_disable_histate_strips_everything_of_ours(machine, gpu) -> None:
    asked = machine(gpu)
    command, env = prepare(
        [
            "--disable-histate",
            "--histate-ssd-dir",
            "/ssd",
            "--histate-interval=none",
            "--model-path",
            "m",
            "--port",
            "1",
        ],
        {},
    )
    assert asked == [() if gpu else ("cpu",)] and "histate" not in env["HISTATE_GROUPS"]
    assert not [part for part in command if "histate" in part]
    assert command[:4] == ["--model-path", "m", "--port", "1"]
    assert gpu == (command == ["--model-path", "m", "--port", "1"]), "on a GPU stock is really stock"
    assert "HISTATE_OVERLAY" in env or gpu


def test_disable_histate_needs_no_directory(machine) -> None:
    machine(True)
    prepare(["--disable-histate", "--model-path", "m"], {})
    with pytest.raises(ConfigError, match="--histate-ssd-dir is missing"):
        prepare(["--model-path", "m"], {})


@pytest.mark.parametrize(
    "flag", ["--page-size", "--radix-cache-backend", "--mamba-track-interval", "--device"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_the_users_flags_win(machine, flag, joined) -> None:
    machine(False)
    given = [f"{flag}=mine"] if joined else [flag, "mine"]
    command, _ = prepare(["--histate-ssd-dir", "/ssd", "--model-path", "m", *given], {})
    assert [part for part in command if part.startswith(flag)] == given[:1] and (
        joined or value(command, flag) == "mine"
    )


def test_the_users_environment_wins(machine) -> None:
    machine(False)
    _, env = prepare(["--histate-ssd-dir", "/ssd", "--model-path", "m"], {"SGLANG_USE_CPU_ENGINE": "0"})
    assert env["SGLANG_USE_CPU_ENGINE"] == "0"


def test_other_spellings_of_the_same_flag_count(machine, monkeypatch) -> None:
    machine(True)
    command, _ = prepare(["--histate-ssd-dir", "/s", "--model", "m", "--enable-hicache"], {})
    assert "--enable-hierarchical-cache" not in command
    monkeypatch.setattr("sglang_histate.demo.ensure_demo_model", lambda: Path("/demo"))
    command, _ = prepare(["--histate-ssd-dir", "/s", "--demo", "--model", "m"], {})
    assert "--model-path" not in command


def test_with_defaults() -> None:
    assert with_defaults(["--a", "1"], {"--a": "2", "--b": None, "--c": "3"}) == [
        "--a",
        "1",
        "--b",
        "--c",
        "3",
    ]
    assert with_defaults(["--a=1"], {"--a": "2"}) == ["--a=1"]
    assert with_defaults(["--model", "m"], {"--model-path": "d"}) == ["--model", "m"]


def test_the_demo_model(machine, monkeypatch) -> None:
    machine(False)
    monkeypatch.setattr("sglang_histate.demo.ensure_demo_model", lambda: Path("/demo"))
    command, env = prepare(["--demo", "--histate-ssd-dir", "/ssd"], {})
    assert value(command, "--model-path") == "/demo" and value(command, "--dtype") == "float32"
    assert env["SGLANG_MAMBA_CONV_DTYPE"] == "float32" and "--demo" not in command


def test_the_hosts_memory_has_one_size(machine, monkeypatch) -> None:
    machine(False)
    asked = []
    monkeypatch.setattr(launch_server, "check_host_size", lambda size, nodes: asked.append((size, nodes)))
    base = ["--histate-ssd-dir", "/ssd", "--model-path", "m"]
    command, _ = prepare([*base, "--histate-host-size", "4GiB", "--nnodes=2"], {})
    assert value(command, "--histate-host-size") == "4GiB" and asked == [(4 << 30, 2)]
    # SGLang would otherwise derive a ratio from the memory that is free, and refuse where little is.
    assert value(command, "--hicache-ratio") == "1"
    for given in ([], ["--histate-host-size", "auto"]):
        assert "--hicache-ratio" not in prepare([*base, *given], {})[0]
    for flag in ("--hicache-size", "--hicache-ratio", "--hicache-host-memory-fraction"):
        for argv in ([flag, "2"], [f"{flag}=2"]):
            with pytest.raises(ConfigError, match=f"^--histate-host-size and {flag} 2 both"):
                prepare([*base, "--histate-host-size", "4GiB", *argv], {})
        assert value(prepare([*base, flag, "2"], {})[0], flag) == "2"


def test_help_is_never_refused(machine) -> None:
    asked = machine(True)
    for argv in (["--help"], ["-h"], ["--disable-histate", "--help"]):
        command, _ = prepare(argv, {})
        assert set(argv) - {"--disable-histate"} <= set(command)
    assert asked == [("histate",)] * 3


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4"], 4),
        (["--tensor-parallel-size", "2", "--dp", "2"], 4),
        (["--tp", "two"], 1),
        (["--tp"], 1),
        (["--tp", "0"], 1),
    ],
)
def test_ranks(argv, ranks) -> None:
    assert launch_server._rank_count(argv) == ranks


@pytest.mark.parametrize(
    ("ranks", "cores", "text"),
    [(2, [0, 1], "0|1"), (2, [0, 1, 2, 3], "0,1|2,3"), (2, [5], "5|5"), (3, [0, 1], "0|1|0")],
)
def test_ranks_share_the_cores(ranks, cores, text) -> None:
    assert launch_server._bind_threads(ranks, cores) == text


def test_cores_are_only_bound_for_several_ranks(machine) -> None:
    machine(False)
    for argv, bound in (([], False), (["--tp", "2"], True)):
        _, env = prepare(["--histate-ssd-dir", "/s", "--model-path", "m", *argv], {})
        assert ("SGLANG_CPU_OMP_THREADS_BIND" in env) is bound


def test_the_directory_is_checked_before_anything_is_built(machine, monkeypatch) -> None:
    asked = machine(True)

    def refuse(*_, **__) -> None:
        raise StoreError("--histate-ssd-dir: no")

    monkeypatch.setattr(launch_server, "check_roots", refuse)
    with pytest.raises(StoreError):
        prepare(["--histate-ssd-dir", "/ssd"], {})
    assert asked == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model-path", "m"], "error: --histate-ssd-dir is missing"),
        (["--histate-nope", "1"], "error: --histate-nope is not a HiState flag"),
        (
            ["--histate-ssd-dir", "/ssd", "--histate-ssd-size", "1GB"],
            "error: --histate-ssd-size: '1GB' is not a size",
        ),
        (["--histate-ssd-dir", "/ssd", "--histate-interval", "fixed:7"], "error: --histate-interval: "),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(machine, capsys, argv, sentence) -> None:
    machine(True)
    assert main(argv) == EXIT_CODE == 2
    err = capsys.readouterr().err
    assert err.startswith(sentence) and err.count("\n") == 1


def test_a_missing_parent_directory_is_refused(machine, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.undo()
    assert main(["--histate-ssd-dir", str(tmp_path / "no" / "such"), "--model-path", "m"]) == EXIT_CODE
    err = capsys.readouterr().err
    assert err.startswith("error: --histate-ssd-dir") and err.count("\n") == 1


def test_the_process_becomes_the_server(machine, monkeypatch) -> None:
    machine(True)
    seen = []
    monkeypatch.setattr(os, "execve", lambda path, args, env: seen.append((path, args, env)))
    main(["--histate-ssd-dir", "/ssd", "--model-path", "m"])
    ((path, args, env),) = seen
    assert path == sys.executable and args[:3] == [sys.executable, "-m", "sglang_histate.adapter.serve"]
    assert env["HISTATE_GROUPS"] == "histate"


def test_help_lists_our_flags_in_a_group_of_their_own(tmp_path) -> None:
    """The real thing: the launcher, SGLang's own parser, the patched fields."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_histate.launch_server", "--help"],
        env={**os.environ, "COLUMNS": "100"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, _, group = done.stdout.partition("\nHiState:\n")
    assert group, "there is no HiState group"
    for name in FLAG_DEFAULTS:
        assert f"  {flag_name(name)}" in group.split("\n\n", 2)[1], flag_name(name)
        assert f"\n  {flag_name(name)}" not in before, f"{flag_name(name)} is listed twice"
    assert "--page-size" in before


def test_a_config_file_counts_like_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "page-size: 128\nhistate_ssd_dir: /s\ndemo: true\nlora-paths: [a, b]\nskip-server-warmup: false\n"
    )
    argv = ["--port", "1", "--config", str(file), "--page-size", "64"]
    assert launch_server.expand_config_file(argv) == [
        *("--page-size", "128", "--histate-ssd-dir", "/s", "--demo", "--lora-paths", "a", "b"),
        *("--port", "1", "--page-size", "64"),
    ]
    assert launch_server.expand_config_file([f"--config={file}"])[:2] == ["--page-size", "128"]
    assert launch_server.expand_config_file(["--port", "1"]) == ["--port", "1"]


@pytest.mark.parametrize("content", [None, "- a list\n", "a: [1\n"])
def test_a_bad_config_file_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "server.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--config {file}"):
        launch_server.expand_config_file(["--config", str(file)])
