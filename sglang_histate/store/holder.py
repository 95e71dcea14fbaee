"""Which process holds the lock on a slab file. Looks, and takes the lock for a moment only where looking does not tell."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

UNSEEN = 0
"""As a process id: somebody holds it whom this process cannot see, say in another container."""


def lock_holder(fd: int, locks: Path = Path("/proc/locks")) -> int | None:
    """Return the process that holds the lock on the open file `fd`, UNSEEN, or None if nobody does."""
    facts = os.fstat(fd)
    name = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        # "7: FLOCK  ADVISORY  WRITE 4242 08:01:131 0 EOF"; who waits for one has an arrow in front.
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == name:
            return max(UNSEEN, int(fields[4]))
    # Other file systems number their devices differently there, and other process namespaces are left out.
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return UNSEEN
    except OSError:
        return None  # no locks on this file system: no store could be open there
    fcntl.flock(fd, fcntl.LOCK_UN)
    return None
