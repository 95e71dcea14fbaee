"""The systems that are compared: their flags, and how each is emptied and brought to rest between requests."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.internal_hits.budgets import (
    Budgets,
    Holdings,
    Units,
    hicache_ratio,
    histate_holdings,
    stock_holdings,
)
from eval.internal_hits.client import Answer, ask
from eval.internal_hits.machine import cpu_seconds
from eval.servers import Server, ServerFailed

HISTATE, HISTATE_NONE, HICACHE, STOCK, NO_CACHE = "histate", "histate-none", "hicache", "stock", "nocache"
DESCRIPTIONS = {
    HISTATE: "HiState, adaptive intervals, SSD tier",
    HICACHE: "stock HiCache, host tier and file storage tier",
    NO_CACHE: "stock without any prefix cache",
    STOCK: "stock caching on the device only (--disable-histate), a state tracked at every page of an answer (zero reuse "
    "only)",
    HISTATE_NONE: "HiState without interior checkpoints (zero reuse only)",
}
PAGE_SIZE = 64
_REST_S = 0.3
_SETTLED_S = 0.75
_SETTLE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Setup:
    """What all systems of one run share. `chunk` is ``--chunked-prefill-size``, None for SGLang's default."""

    model: str | None
    chunk: int | None
    budgets: Budgets
    work_dir: Path
    reference: Holdings | None = None  # HiState's real bytes, once it has run
    units: Units | None = None
    extra: tuple[str, ...] = ()


def command_line(name: str, setup: Setup) -> tuple[list[str], dict[str, str]]:
    """Return a system's arguments to the launcher and its environment."""
    budgets = setup.budgets
    arguments = ["--demo"] if setup.model is None else ["--model-path", setup.model]
    # The same for all: pools, page and state grids, and no busy waiting, which would take a core from the others.
    arguments += [
        *("--max-total-tokens", str(budgets.device_kv_tokens)),
        *("--max-mamba-cache-size", str(budgets.device_states)),
        *("--page-size", str(PAGE_SIZE)),
        *("--mamba-radix-cache-strategy", "extra_buffer"),
        "--sleep-on-idle",
    ]
    if setup.chunk is not None:
        arguments += ["--chunked-prefill-size", str(setup.chunk)]
    environ: dict[str, str] = {}
    folder = str(disk_dir(name, setup))
    if name in (HISTATE, HISTATE_NONE):
        arguments += [
            *("--hicache-ratio", f"{budgets.host_ratio:.4f}"),
            *("--histate-ssd-dir", folder),
            *("--histate-ssd-size", str(budgets.disk_bytes)),
            *("--histate-inflight-size", str(budgets.inflight_bytes)),
        ]
        if name == HISTATE_NONE:
            arguments += ["--histate-interval", "none"]
    else:
        arguments.append("--disable-histate")
    if name == HICACHE:
        ratio = budgets.host_ratio if setup.reference is None else hicache_ratio(setup.reference)
        storage = {"max_size": budgets.disk_bytes, "eviction_ratio": 1.0, "prefetch_threshold": PAGE_SIZE}
        arguments += [
            "--enable-hierarchical-cache",
            *("--hicache-ratio", f"{ratio:.4f}"),
            *("--hicache-write-policy", "write_through"),
            *("--hicache-storage-backend", "file"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", json.dumps(storage)),
        ]
        environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
    if name in (HICACHE, STOCK):
        # HiState's launcher sets it unasked: the end of an answer is found to within one page, not 256 tokens.
        arguments += ["--mamba-track-interval", str(PAGE_SIZE)]
    if name == NO_CACHE:
        arguments.append("--disable-radix-cache")
    return [*arguments, *setup.extra], environ


def shown(name: str, setup: Setup) -> str:
    """Return the command line as a reader would type it."""
    arguments, environ = command_line(name, setup)
    words = [f"{key}={shlex.quote(value)}" for key, value in environ.items()]
    return " ".join([*words, "python -m sglang_histate.launch_server", shlex.join(arguments)])


def disk_dir(name: str, setup: Setup) -> Path:
    return setup.work_dir / "disk" / name


@dataclass
class Running:
    """One started system."""

    name: str
    setup: Setup
    server: Server
    holdings: Holdings | None = None
    units: Units | None = None
    _disk: Path = field(init=False)

    def __post_init__(self) -> None:
        self._disk = disk_dir(self.name, self.setup)

    @property
    def has_histate(self) -> bool:
        return self.name in (HISTATE, HISTATE_NONE)

    def ask(self, prompt: list[int], output_tokens: int) -> Answer:
        return ask(self.server.port, prompt, output_tokens)

    def ask_counting(self, prompt: list[int], output_tokens: int) -> tuple[Answer, float | None]:
        """Also return the CPU time that all processes of the server took, which other programs disturb less.

        A moment's rest lets what the request leaves to be written be written and counted.
        """
        group = self.server.process.pid
        before = cpu_seconds(group)
        answer = self.ask(prompt, output_tokens)
        time.sleep(_REST_S)
        after = cpu_seconds(group)
        return answer, None if before is None or after is None else after - before

    def measure_holdings(self) -> None:
        """Find out what the server really holds; without HiState's units the bytes stay unknown."""
        if self.has_histate:
            self.holdings, self.units = histate_holdings(self.server.status())
        elif self.setup.units is not None:
            log = self.server.log_file.read_text(encoding="utf-8", errors="replace")
            info = json.loads(self.server.get("/server_info"))
            budgets = self.setup.budgets
            disk = budgets.disk_bytes if self.name == HICACHE else 0
            self.units = self.setup.units
            self.holdings = stock_holdings(info, log, self.units, budgets.device_states, disk)

    def flush(self) -> None:
        """Empty every tier, disk included, and check that it is empty.

        Raises:
            ServerFailed: something stayed behind.
        """
        self.settle()
        self.server.flush()
        if self.name == HICACHE:
            url = self.server.url + "/hicache/storage-backend/clear"
            with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
                answer.read()
            if left := self._disk_bytes():
                raise ServerFailed(f"{self.name}: {left} bytes stayed on disk after a flush")
        if self.has_histate:
            tiers = self.server.status()["tiers"]
            used = [
                tiers["device"]["kv"],
                tiers["host"]["kv"],
                tiers["host"]["states"],
                tiers["ssd"]["checkpoints"],
            ]
            if any(tier["used"] for tier in used):
                raise ServerFailed(f"{self.name}: a flush left something in {tiers}")

    def settle(self) -> None:
        """Return when nothing is being written any more, as after the pause between two turns of an agent.

        Every look at the server also wakes its scheduler, which sleeps while idle and would not see that a write
        ended.
        """
        if self.name in (NO_CACHE, STOCK):
            return
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        before, since = None, time.monotonic()
        while time.monotonic() - since < _SETTLED_S:
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} was still writing after {_SETTLE_TIMEOUT_S:.0f} s")
            now = self._activity()
            if now != before or self._busy(now):
                before, since = now, time.monotonic()
            time.sleep(0.1)

    def counters(self) -> dict[str, Any]:
        """Return HiState's counters, empty for other systems."""
        return self.server.status()["counters"] if self.has_histate else {}

    def _activity(self) -> Any:
        if self.has_histate:
            status = self.server.status()
            return [status["inflight"], status["tiers"]]
        self.server.get("/server_info")
        return self._disk_bytes()

    def _busy(self, activity: Any) -> bool:
        if not self.has_histate:
            return False
        flying = activity[0]
        moving = flying["writes"] or flying["reads"] or flying["fault_ins"]
        return bool(moving) or flying["records_free"] < flying["records_total"]

    def _disk_bytes(self) -> int:
        total = 0
        for path in self._disk.glob("**/*.bin"):
            with contextlib.suppress(FileNotFoundError):  # evicted while we looked
                total += path.stat().st_size
        return total
