"""What a running store has to remember of its use: the snapshots of one run, taken here, written by a thread."""

from __future__ import annotations

from collections.abc import Callable

from sglang_histate.policy.write_budget import WriteBudget

from .index import Index
from .layout import Fingerprint
from .opening import Opened
from .snapshot import Snapshot


class Usage:
    def __init__(self, opened: Opened, fingerprint: Fingerprint, budget: WriteBudget) -> None:
        self._file = opened.snapshots
        self._epoch = opened.epoch
        self._written_before = opened.written
        self._fingerprint = fingerprint
        self._budget = budget
        self._on_its_way = False

    @property
    def wanted(self) -> bool:
        """False while a snapshot waits to be written, and where there is no file for it."""
        return self._file is not None and not self._on_its_way

    def taken(self, index: Index, newest: int) -> Callable[[], None]:
        """Take a snapshot; return what another thread has to call to write it. That may raise OSError."""
        self._on_its_way = True
        _, today = written = self._budget.state()
        snapshot = Snapshot(
            self._epoch, newest, tuple(index.names()), written if today else self._written_before
        )
        return lambda: self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        self._on_its_way = False
        if self._file is not None:
            self._file.replace(snapshot.pack(self._fingerprint))
