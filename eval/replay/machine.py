"""What a run needs from the operating system: an empty page cache, and how much a server wrote."""

from __future__ import annotations

import os
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")


def drop_page_cache(switch: Path = _DROP) -> str:
    """Write what is dirty and drop the clean pages. Return "dropped", or why that was not possible."""
    os.sync()
    try:
        switch.write_text("1\n")
    except OSError as error:
        return f"not dropped: {error.strerror or error}"
    return "dropped"


def written_bytes(group: int, proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that the live processes of a process group caused to be written to disks, logs included.

    Pages of files that were deleted before they reached a disk are not counted. None where the system does not tell.
    """
    total, found = 0, False
    for folder in proc.glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            lines = (folder / "io").read_text().splitlines()
        except OSError:  # ended while we looked, or of another user
            continue
        counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
        total += counts["write_bytes"] - counts["cancelled_write_bytes"]
        found = True
    return total if found else None
