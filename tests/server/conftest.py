"""One server at a time and worker: starting costs most of the time, and idle ones would share the cores with the others.

A module asks for a server by its spec; while the spec stays the same the server stays. Tests that use the main server
run first, then the others, so that the suite starts each server once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eval.servers import Server

FOLDER = "{folder}"
"""In a spec's arguments and environment: the folder of this run."""
# Threads that wait actively for each other are slow where several servers share few cores.
ENVIRON = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
# The default of HiCache depends on the memory that is free, and refuses to start where others use most of it.
HOST_SIZE = ("--hicache-ratio", "2")
MODULE_ORDER = (
    "test_tensor_parallel", "test_restart", "test_refusals", "test_openai_api", "test_metrics", "test_first_steps", "test_rewrites",
    "test_tiers", "test_hints", "test_known_failures", "test_edges", "test_explain", "test_size",
    "test_switched_off", "test_one_pool", "test_write_limits", "test_capture", "test_checkpoint_dtype", "test_learned_places", "test_fuzz", "test_verify", "test_purge",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A server to start. `name` is its log and directory; HiState's directory flag is added unless it is off."""

    name: str
    arguments: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    histate: bool = True
    sizes: tuple[str, ...] = field(
        default=("--histate-ssd-size", "64MiB", "--histate-inflight-size", "16MiB")
    )


MAIN = Spec("main", ("--chunked-prefill-size", "8192", "--max-total-tokens", "20480"))


class Servers:
    """Starts servers, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec: Spec | None = None
        self._server: Server | None = None

    @property
    def folder(self) -> Path:
        return self._folder

    def ssd_dir(self, spec: Spec) -> Path:
        return self._folder / f"{spec.name}-ssd"

    def get(self, spec: Spec) -> Server:
        """Return a ready, flushed server for `spec`."""
        if self._spec != spec or self._server is None or self._server.process.poll() is not None:
            self.stop()
            given = [argument.replace(FOLDER, str(self._folder)) for argument in spec.arguments]
            arguments = ["--demo", *given]
            if spec.histate:
                arguments += ["--histate-ssd-dir", str(self.ssd_dir(spec)), *spec.sizes]
                if "--histate-host-size" not in spec.sizes:
                    arguments += HOST_SIZE
            else:
                arguments += ["--disable-histate"]
            log = self._folder / f"{spec.name}.log"
            environ = {name: value.replace(FOLDER, str(self._folder)) for name, value in spec.environ}
            self._server = Server(arguments, log, {**ENVIRON, **environ})
            self._spec = spec
            self._server.wait_ready()
        self._server.flush()
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = self._spec = None


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(tmp_path_factory.mktemp("servers"))
    yield found
    found.stop()


@pytest.fixture
def main(servers: Servers) -> Server:
    """The server that most tests share: one chunk per prompt, a small device pool, an empty cache."""
    return servers.get(MAIN)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First all tests on the main server, then the others in the order above; inside a module spec by spec.

    With several workers all tests on the main server go to one of them.
    """

    def place(item: pytest.Item) -> tuple[int, int, str]:
        if item.path.parent != Path(__file__).parent:
            return -1, 0, ""
        module = MODULE_ORDER.index(item.path.stem)
        if "main" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("main server"))
            return 0, module, ""
        call = getattr(item, "callspec", None)
        spec = None if call is None else call.params.get("spec")
        return 1, module, spec.name if isinstance(spec, Spec) else ""

    items.sort(key=place)
