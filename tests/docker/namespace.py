"""A process that is number 1 and another user, as in a container, where this user may make one of that kind.

Python and the installed packages may lie in a home that is closed to others. In the process's own mount namespace they
are shown at the same place, below directories that are open.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def wrapped(command: Sequence[str], uid: int, stash: Path, needed: Sequence[Path]) -> list[str]:
    """Return the command line that runs `command` as process 1 and as `uid`. Only for root, see `allowed`."""
    script = ["set -e"]
    closed = sorted({top for path in needed if (top := _closed(path)) is not None})
    hidden = [path for path in needed if any(path.is_relative_to(top) for top in closed)]
    for number, path in enumerate(hidden):
        place = shlex.quote(str(stash / str(number)))
        script += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
    script += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}" for top in closed]
    for number, path in enumerate(hidden):
        place = shlex.quote(str(path))
        script += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(stash / str(number)))} {place}"]
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return [*_UNSHARE, "sh", "-c", "\n".join([*script, 'exec "$@"']), "container", *become, *command]


@cache
def allowed() -> bool:
    """Return whether this user may make such a process."""
    if os.geteuid() != 0:
        return False
    try:
        done = subprocess.run([*_UNSHARE, "sh", "-c", "mount -t tmpfs tmpfs /mnt && setpriv --reuid=1 true"], capture_output=True)  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0


def python_folders() -> list[Path]:
    """Return what a virtual environment on this machine's Python and packages reads."""
    return [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]


def _closed(path: Path) -> Path | None:
    """Return the first directory on the way to `path` that others may not enter."""
    for directory in (*reversed(path.parents), path):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None
