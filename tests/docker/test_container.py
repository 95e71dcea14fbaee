"""The CPU image's steps, carried out without an engine; then its container: it answers, and ends with an error when a
scheduler dies.

Everything is real but for three things. Paths lie below a temporary folder. What the package index would deliver is
there already: the new virtual environment sees the installed packages. And there is no image to start from, so Python is
this machine's. As root, the container is another user and number 1 in its own process namespace, as with docker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from eval.servers import free_port

from . import namespace
from .dockerfile import Builder, Image, interpreter_with, parse

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
IMAGE_PATHS = ("/opt/histate", "/var/lib/histate", "/home/histate", "/etc/passwd", "/etc/group")


UID = 10001 if namespace.allowed() else os.getuid()  # the image's own where this user may become it


@dataclass(frozen=True)
class Built:
    builder: Builder
    image: Image
    folder: Path


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    # Not pytest's folder: that one is closed to the container's user.
    folder = Path(tempfile.mkdtemp(prefix="histate-image-"))
    folder.chmod(0o755)
    try:
        path = f"{interpreter_with(PACKAGES, folder / 'bin')}:/usr/local/bin:/usr/bin:/bin"
        # setuptools is installed, so nothing has to be downloaded to build the wheel either.
        env = {
            "PATH": path,
            "LANG": "C.UTF-8",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        env |= {"TMPDIR": str(folder / "tmp"), "PIP_NO_INDEX": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        roots = {name: folder / "root" / name.removeprefix("/") for name in IMAGE_PATHS}
        (folder / "root" / "etc").mkdir(parents=True)
        builder = Builder(ROOT, roots, run=True, env=env)
        steps = parse((ROOT / "docker" / "Dockerfile.cpu").read_text(encoding="utf-8"))
        yield Built(builder, builder.build(steps, {"UID": str(UID)}), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Container:
    """`docker run` of a built image. As root in a process namespace, and as the image's user."""

    def __init__(self, built: Built, command: list[str]) -> None:
        self.log_file = built.folder / "container.log"
        words = [built.builder.here(word) for word in (*built.image.entrypoint, *command)]
        if namespace.allowed():
            words = namespace.wrapped(words, UID, built.folder / "stash", namespace.python_folders())
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=built.builder.environ(),
                cwd=built.builder.here(built.image.workdir),
                start_new_session=True,
            )

    def init(self) -> psutil.Process:
        """The container's process 1, below the wrappers."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            outer = psutil.Process(self.process.pid)
            for one in (outer, *outer.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
                    if any(word.endswith("/init.py") for word in one.cmdline()[:2]):
                        return one
            time.sleep(0.05)
        raise AssertionError(f"nothing runs init.py: {self.log()}")

    def schedulers(self) -> list[psutil.Process]:
        return [one for one in self.init().children(recursive=True) if "scheduler" in " ".join(one.cmdline())]

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


def test_the_steps_leave_a_package_an_overlay_and_a_user(built: Built) -> None:
    here = built.builder.here
    shown = subprocess.run(
        [here("/opt/histate/venv/bin/python"), "-c", "import sglang_histate; print(sglang_histate.__file__)"],
        env=built.builder.environ(),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith(here("/opt/histate/venv/lib")), shown.stderr
    overlays = list(Path(here("/opt/histate/cache/overlays")).glob("0.5.23-*/manifest.json"))
    assert len(overlays) == 2 and {path.stat().st_uid for path in overlays} == {UID}
    data = Path(here("/var/lib/histate")).stat()
    assert data.st_mode & 0o777 == 0o700 and data.st_uid == UID
    assert f"histate:x:{UID}:" in Path(here("/etc/passwd")).read_text()
    if os.getuid() != UID:
        assert UID not in {entry.pw_uid for entry in pwd.getpwall()}  # of this machine


def test_the_container_answers_and_fails_when_a_scheduler_dies(built: Built) -> None:
    port = free_port()
    small = ["--port", str(port), "--histate-ssd-size", "64MiB", "--histate-inflight-size", "16MiB"]
    container = Container(
        built, [*built.image.command, *small, "--hicache-ratio", "2", "--max-total-tokens", "8192"]
    )
    try:
        health = [built.builder.here(word) for word in built.image.health]
        deadline = time.monotonic() + 480
        while subprocess.run([*health, str(container.init().pid)], env=built.builder.environ(), capture_output=True).returncode:  # fmt: skip
            assert container.process.poll() is None, container.log()
            assert time.monotonic() < deadline, container.log()
            time.sleep(1)
        body = {"model": "histate-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        files = list(Path(built.builder.here("/var/lib/histate/ssd")).rglob("slabs.dat"))
        assert files and {path.stat().st_uid for path in files} == {UID}

        schedulers = container.schedulers()
        assert schedulers, [one.cmdline() for one in container.init().children(recursive=True)]
        schedulers[0].kill()
        code = container.process.wait(60)
        assert code not in (0, None), container.log()
        assert "init: the server was ended by SIGKILL" in container.log() and code == 137
    finally:
        container.close()
