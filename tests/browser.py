"""Headless Chromium through its WebDriver, for tests that look at a page as a reader does.

Without the programs `chromium` and `chromedriver` (Debian packages chromium and chromium-driver) such tests are skipped;
what does not need a browser is tested without one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from eval.servers import free_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed"
)


class Browser:
    """One window. Use as a context manager; `folder` is for the profile and the driver's log."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "chromedriver.log").open("w")
        self._driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._folder = folder
        self._session = ""

    def __enter__(self) -> Browser:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1200,1600",
        ]
        arguments.append(f"--user-data-dir={self._folder / 'profile'}")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }  # fmt: skip
        try:
            self._wait_for_driver()
            answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end()
            raise
        self._session = f"/session/{answer['sessionId']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._send("DELETE", self._session)
        finally:
            self._end()

    def open(self, url: str) -> None:
        self._send("POST", self._session + "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the body of a function gives in the page."""
        return self._send(
            "POST", self._session + "/execute/sync", {"script": script, "args": list(arguments)}
        )

    def wait(self, script: str, timeout_s: float = 30.0) -> Any:
        """Return the first true value of a script that is run again and again."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"still not so after {timeout_s} s: {script}"
            time.sleep(0.1)
        return found

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def complaints(self) -> list[str]:
        """Return what the console has got of errors since it was last asked."""
        entries = self._send("POST", self._session + "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                if self._send("GET", "/status")["ready"]:
                    return
            except OSError:
                pass
            assert self._driver.poll() is None and time.monotonic() < deadline, "chromedriver does not start"
            time.sleep(0.1)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[:1000]}") from None

    def _end(self) -> None:
        os.killpg(self._driver.pid, signal.SIGTERM)
        self._driver.wait(20)
        self._log.close()
