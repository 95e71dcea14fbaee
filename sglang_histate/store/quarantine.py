"""`quarantined.json`, beside the slabs: the records of this store were found to be wrong, and nothing of it may be used.

A checksum says that the bytes are those that were written, not that they were right. Once a record was wrong, none of
its neighbours can be told from it, whatever their sums say. So the file counts for the whole store and for every later
run, until somebody takes the store away. It is made for people to read; that it is there is all that a program needs.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .private_files import read_own

QUARANTINE_FILE = "quarantined.json"


@dataclass(frozen=True)
class Quarantine:
    """Since when, in seconds since 1970, and why."""

    since_s: float
    why: str

    @property
    def since(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since_s))


def read_quarantine(file: Path) -> Quarantine | None:
    """Return what `file` says, None if there is no such file. One that cannot be read or understood counts as well."""
    try:
        found = json.loads(read_own(file))
        return Quarantine(float(found["since_s"]), str(found["why"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as error:
        return Quarantine(0.0, f"{file.name} cannot be read: {error}")


def write_quarantine(file: Path, quarantine: Quarantine) -> None:
    """Write `file`, durably. One that is there already stays: it says what was found first.

    Raises:
        OSError: it could not be written.
    """
    text = json.dumps({"since_s": quarantine.since_s, "since": quarantine.since, "why": quarantine.why})
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
