"""Process 1 of the container: exit codes, signals, orphans; and the health check."""

from __future__ import annotations

import http.server
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
INIT = (sys.executable, str(DOCKER / "init.py"))


def start(code: str, **kwargs) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*INIT, sys.executable, "-uc", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_an_exit_code_is_handed_on() -> None:
    assert ended(start("raise SystemExit(2)"))[0] == 2


def test_a_server_that_kills_itself_as_sglang_does_is_a_failure() -> None:
    code, _, err = ended(start("import os; os.kill(os.getpid(), 9)"))
    assert code == 137 and "SIGKILL" in err


def test_a_server_that_ends_well_unasked_is_a_failure() -> None:
    code, _, err = ended(start("pass"))
    assert code == 1 and "nobody asked" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_was_asked_to_end_has_done_well(number: signal.Signals) -> None:
    process = start(
        "import signal\ndef end(n, f):\n    print('asked', n)\n    raise SystemExit(0)\n"
        f"signal.signal({int(number)}, end)\nprint('up')\nwhile True: signal.pause()"
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert ended(process) == (0, f"asked {int(number)}\n", "")


@pytest.mark.parametrize(("last", "code"), [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_server_that_fails_while_it_ends_is_a_failure(last: str, code: int) -> None:
    process = start(
        f"import os, signal\ndef end(n, f): {last}\nsignal.signal(15, end)\nprint('up')\nwhile True: signal.pause()"
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == code


def test_a_signal_before_the_child_runs_is_not_lost() -> None:
    for _ in range(5):
        process = start("import time; time.sleep(60)")
        process.send_signal(signal.SIGTERM)
        # Before Python has its handlers SIGTERM ends init itself, later the child: never nobody.
        assert ended(process)[0] in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_child_has_plain_signal_handling() -> None:
    code, out, _ = ended(
        start(
            "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(15) is signal.SIG_DFL)\n"
            "raise SystemExit(5)"
        )
    )
    assert code == 5 and out == "set() True\n"


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may make a process number 1 in a namespace of its own"
)
def test_as_process_1_orphans_are_collected() -> None:
    """A grandchild whose parent ends becomes init's, and leaves no zombie behind."""
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.run(['sh', '-c', 'sleep 0.2 & exit 0'])\n"
        "time.sleep(1.5)\n"
        "states = [open(f'/proc/{p}/stat').read().rsplit(')', 1)[1].split()[0] for p in os.listdir('/proc') if p.isdigit()]\n"
        "print(os.getppid(), 'Z' in states)\n"
        "raise SystemExit(7)"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces here: {error}")
    done = subprocess.run(
        [*unshare, *INIT, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (7, "1 False\n"), done.stderr


def test_without_a_command() -> None:
    done = subprocess.run(INIT, capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr


class _Answer(http.server.BaseHTTPRequestHandler):
    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(("answer", "code"), [(200, 0), (503, 1), (None, 1)])
def test_health_asks_the_port_of_the_servers_command_line(answer: int | None, code: int) -> None:
    handler = type("Handler", (_Answer,), {"code": answer})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if answer is None:
        server.server_close()
    else:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    words = ["x", "--port", "1", f"--port={server.server_port}", "--demo"]
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", *words], stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.05)
        done = subprocess.run(
            [sys.executable, str(DOCKER / "health.py"), str(process.pid)], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert bool(done.stderr) == bool(code)
    finally:
        process.kill()
        process.wait()
        if answer is not None:
            server.shutdown()


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o600, 126)])
def test_a_command_that_cannot_be_run(tmp_path: Path, mode: int | None, code: int) -> None:
    command = tmp_path / "server"
    if mode is not None:
        command.write_text("#!/bin/sh\n")
        command.chmod(mode)
    done = subprocess.run([*INIT, str(command)], capture_output=True, text=True)
    assert done.returncode == code and len(done.stderr.splitlines()) == 1 and str(command) in done.stderr


def test_a_signal_without_a_name() -> None:
    number = signal.SIGRTMIN + 3
    code, _, err = ended(start(f"import os; os.kill(os.getpid(), {int(number)})"))
    assert code == 128 + number and str(int(number)) in err and "Traceback" not in err


def test_signals_while_the_server_ends_change_nothing() -> None:
    """One of them comes when the server has been collected and its number may be somebody else's."""
    process = start("import signal\nsignal.signal(10, signal.SIG_IGN)\nprint('up')\ninput()\nraise SystemExit(5)", stdin=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (5, "")


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ((), "http://127.0.0.1:30000/health"),
        (("--host", "0.0.0.0", "--port", "8000"), "http://127.0.0.1:8000/health"),
        (("--host=10.0.0.7",), "http://10.0.0.7:30000/health"),
        (("--host", "::"), "http://[::1]:30000/health"),
        (("--ssl-certfile", "cert.pem", "--port=1", "--port=2"), "https://127.0.0.1:2/health"),
    ],
)
def test_health_asks_where_the_server_listens(words: tuple[str, ...], url: str) -> None:
    spec = importlib.util.spec_from_file_location("health", DOCKER / "health.py")
    assert spec is not None and spec.loader is not None
    health = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(health)
    assert health.url_of(["python", "-m", "sglang_histate.launch_server", *words]) == url
