"""How a store ends: what was submitted is written, the threads end, the file says that all is in order.

Nothing in here may hang for long on a bad disk, and nothing in here raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .block_zero import BlockZero
from .disk import Disk
from .events import EventLog
from .reader import Reader
from .writer import Writer

CLOSE_DEADLINE_S = 2.0
GRACE_S = 0.5


def end_threads(writer: Writer, reader: Reader, deadline_s: float) -> tuple[bool, bool]:
    """Return (all threads have ended, all that was submitted was tried in time)."""
    deadline = time.monotonic() + deadline_s
    reader.stop()
    writer.finish()
    drained = writer.join(deadline)
    writer.stop()
    deadline = max(deadline, time.monotonic()) if drained else deadline
    ended = writer.join(deadline + GRACE_S) and reader.join(deadline + GRACE_S)
    return ended, drained


def shut(
    disk: Disk,
    block_zero: BlockZero,
    write_snapshot: Callable[[], None],
    *,
    clean: bool,
    events: EventLog,
) -> None:
    """Sync the slabs, write the snapshot, say in the superblock that all is well (`clean`), close the file.

    The superblock goes last: it vouches for the rest. A clear that could not be written down before is now.
    """
    try:
        disk.sync()
        write_snapshot()
        block_zero.end(clean=clean)
        disk.sync()
    except OSError as error:
        events.warn("sync", "the slab file could not be left in order: %s", error)
    disk.close()
