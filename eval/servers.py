"""Start and stop a server of this repository, on this machine, for tests and measurements."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message ends with the last lines of its log."""


class Server:
    """One ``python -m sglang_histate.launch_server`` process. Use as a context manager.

    `arguments` are its command line without the port. The log goes to `log_file`.
    """

    def __init__(self, arguments: list[str], log_file: Path, environ: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log_file
        command = [sys.executable, "-m", "sglang_histate.launch_server", "--port", str(self.port), *arguments]
        self._log = log_file.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # so that stop reaches every child
        )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Server:
        """Return once a generation has gone through."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with {self.process.returncode}\n{self.log_tail()}")
            try:
                if self.get("/health_generate", timeout_s=30.0) is not None:
                    return self
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.5)
        raise ServerFailed(f"the server was not ready after {timeout_s:.0f} s\n{self.log_tail()}")

    def get(self, path: str, timeout_s: float = 60.0) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        """Return the JSON answer.

        Raises:
            urllib.error.HTTPError: the server refused; its body says why.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())

    def generate(self, input_ids: list[int], max_new_tokens: int = 4, **fields: Any) -> dict[str, Any]:
        """Greedy completion of token ids through ``/generate``, with log probabilities."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **fields}
        return self.post("/generate", body)

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/histate/status"))

    def settle(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until no checkpoint is on its way, and return the status."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            flying = status["inflight"]
            idle = not (flying["writes"] or flying["reads"] or flying["fault_ins"])
            if idle and flying["records_free"] == flying["records_total"]:
                return status
            if time.monotonic() > deadline:
                raise ServerFailed(f"checkpoints were still in flight after {timeout_s:.0f} s: {flying}")
            time.sleep(0.05)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Empty every cache tier, waiting for the server to become idle."""
        self.get(f"/flush_cache?timeout={timeout_s:.0f}", timeout_s=timeout_s + 10)

    def log_tail(self, lines: int = 25) -> str:
        self._log.flush()
        text = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:400] for line in text[-lines:])

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
