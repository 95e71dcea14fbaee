"""How a store ends: what was submitted is written, the threads end, the files say that all is in order.

Nothing in here may hang for long on a bad disk, one bad disk does not keep the others from an orderly end, and
nothing in here raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .events import EventLog
from .roots import Root, Roots

CLOSE_DEADLINE_S = 2.0
GRACE_S = 0.5
SHUT_S = 2.0


@dataclass(frozen=True)
class Ended:
    """`quiet`: no thread uses the file any more; `drained`: all that was submitted was tried in time."""

    root: Root
    quiet: bool
    drained: bool


def end_threads(roots: Roots, deadline_s: float) -> list[Ended]:
    """Let the writers end in order for `deadline_s` seconds, then give all threads `GRACE_S` more."""
    deadline = time.monotonic() + deadline_s
    for root in roots:
        root.reader.stop()
        root.writer.finish()
    drained = [root.writer.join(deadline) for root in roots]
    for root in roots:
        root.writer.stop()
    deadline += GRACE_S
    quiet = [root.writer.join(deadline) and root.reader.join(deadline) for root in roots]
    return [Ended(*each) for each in zip(roots, quiet, drained, strict=True)]


def shut(ended: list[Ended], write_snapshot: Callable[[], None], events: EventLog) -> None:
    """Leave the files in order whose threads have ended; the others stay open until the process ends.

    Takes `SHUT_S` seconds at most: a disk may hang in a sync too.
    """
    threads = []
    for one in ended:
        if not one.drained:
            events.warn(
                f"close {one.root.number}",
                "--histate-ssd-dir %s: some records could not be written before the store was closed",
                one.root.name,
            )
        if not one.quiet:
            events.warn(
                f"hung {one.root.number}",
                "--histate-ssd-dir %s: a read or write did not end; the slab file stays open until exit",
                one.root.name,
            )
            continue
        snapshot = write_snapshot if one.root.number == 0 else None
        threads.append(threading.Thread(target=_shut, args=(one, snapshot, events), daemon=True))
        threads[-1].start()
    deadline = time.monotonic() + SHUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _shut(one: Ended, write_snapshot: Callable[[], None] | None, events: EventLog) -> None:
    """Sync the slabs, write the snapshot, say in the superblock that all is well, close the file.

    The superblock goes last: it vouches for the rest. A clear that could not be written down before is now.
    """
    disk = one.root.disk
    try:
        disk.sync()
        if write_snapshot is not None:
            write_snapshot()
        one.root.block_zero.end(clean=one.drained)
        disk.sync()
    except OSError as error:
        events.warn(
            f"sync {one.root.number}",
            "--histate-ssd-dir %s: the slab file could not be left in order: %s",
            one.root.name,
            error,
        )
    disk.close()
