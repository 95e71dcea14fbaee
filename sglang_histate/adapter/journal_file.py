"""The policy's journal as a file. A thread writes it, so that the scheduler never waits for the disk."""

from __future__ import annotations

import atexit
import json
import logging
import queue
import threading
from pathlib import Path

from sglang_histate.adapter.refusal import Refusal
from sglang_histate.policy.journal import Event, Journal

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 20
"""Events that may wait for a slow disk. After that the log ends, with a warning: a log with gaps is of no use."""


def open_journal(path: str | None, rank: str) -> Journal | None:
    """Return a journal that goes to `path`, None without one. `rank` is added to the name, "" for the first.

    Raises:
        Refusal: the file cannot be written.
    """
    if path is None:
        return None
    name = Path(f"{path}.{rank}" if rank else path)
    try:
        return Journal(JournalFile(name).emit)
    except OSError as error:
        raise Refusal(
            f"--histate-policy-log {path}: {error.strerror}: name a file in a folder that is there"
        ) from None


class JournalFile:
    """One JSON array a line. What waits when the process ends is written first."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._path = path
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="histate-policy-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, event: Event) -> None:
        if self._ended:
            return
        if self._events.qsize() > MOST_WAITING:
            self._end("the disk is too slow for it")
            return
        self._events.put(event)

    def close(self) -> None:
        """Write what waits. Later events are not written."""
        if not self._ended:
            self._ended = True
            self._events.put(None)
        self._thread.join(10)

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            logger.warning("HiState: the policy log %s ends here: %s", self._path, why)
            self._events.put(None)

    def _write(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
                if self._events.empty():
                    self._file.flush()
            self._file.close()
        except OSError as error:
            self._end(str(error))
