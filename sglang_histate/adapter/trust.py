"""Whether what the SSD has may be used. Trust is lost once and for all: a hit that is wrong is the worst there can be.

A stored state that differs from what its tokens give was wrong before its sum was taken, or landed in the wrong place.
Neither has anything to do with whose prompt it was, so the whole store goes: all ranks, all namespaces. What was
computed from restored states lies in the tree under the same names as everything else, so the tree goes too: until the
server is idle and can be flushed, nothing is taken from it and nothing is put in.

After that the server serves from device and host. A note beside the slabs keeps the next run from using them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_histate.store import CheckpointStore
from sglang_histate.store.quarantine import QUARANTINE_FILE, Quarantine, read_quarantine, write_quarantine

logger = logging.getLogger(__name__)


class Trust:
    """Scheduler thread only. `folders` are where this rank's slabs lie, one for each root."""

    def __init__(self, store: CheckpointStore, folders: Sequence[Path], agreement: Any) -> None:
        self._store = store
        self._folders = tuple(folders)
        notes = [read_quarantine(folder / QUARANTINE_FILE) for folder in self._folders]
        # What one root holds is as wrong as what the others do, and a root may have been left out meanwhile.
        self.quarantine = next((note for note in notes if note is not None), None)
        self.other_weights = False  # the server has others than it started with
        # The tree may hold something that was computed from a wrong state.
        self.tree_doubted = False
        if agreement.minimum([-int(self.quarantine is not None)])[0] < 0:
            self._begin(self.quarantine or Quarantine(time.time(), "another rank's store is in quarantine"))

    def lose(self, why: str) -> None:
        """Use nothing of the store any more. All ranks call it in the same step; `why` may differ."""
        self.tree_doubted = True
        if self.quarantine is None:
            self._begin(Quarantine(time.time(), why))

    def weights_change(self) -> None:
        """Use nothing of the store any more: its name stands for the weights that the server started with.

        Nothing on the disk is wrong, so there is no note: with the old weights the next run uses it again. All ranks
        call it in the same step.
        """
        if self.other_weights:
            return
        self.other_weights = True
        self._store.quarantine()
        logger.warning(
            "HiState: weights are changed while the server runs. The SSD tier belongs to those that it started with, so it is "
            "neither read nor written any more; start the server again with the new ones to have it back."
        )

    def flushed(self) -> None:
        """The tree is empty: what comes into it from now on was computed."""
        self.tree_doubted = False

    def _begin(self, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._store.quarantine()
        logger.critical(
            "HISTATE ALARM: the SSD tier is in quarantine since %s and is neither read nor written: %s. Keep a copy of %s to "
            "find out why; then stop the server and run histate store purge, or name another --histate-ssd-dir.",
            quarantine.since,
            quarantine.why,
            " and ".join(str(folder) for folder in self._folders) or "the store",
        )
        for folder in self._folders:
            # A disk that hangs must not stop the scheduler, least of all now.
            threading.Thread(
                target=self._note,
                args=(folder / QUARANTINE_FILE, quarantine),
                name="histate-note",
                daemon=True,
            ).start()

    @staticmethod
    def _note(file: Path, quarantine: Quarantine) -> None:
        try:
            write_quarantine(file, quarantine)
        except OSError as error:
            logger.critical(
                "HISTATE ALARM: %s could not be written (%s): a restart would not know", file, error
            )

    def as_json(self) -> dict[str, Any]:
        found = self.quarantine
        return {
            "quarantined": found is not None,
            "quarantined_since": None if found is None else found.since,
            "quarantine_reason": None if found is None else found.why,
            "weights_changed": self.other_weights,
        }
