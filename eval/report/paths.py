"""Text without the paths of one machine: a report is read on others."""

from __future__ import annotations

import re
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w./~-])/(?!/)(?:[\w.@+~-]+/)+[\w.@+~-]*")


def without_paths(text: str, root: Path | None = None) -> str:
    """Return `text` with paths below `root` (default: the current folder) relative, other absolute ones as their last part.

    Addresses such as http://host/v1 stay.
    """
    base = f"{(root or Path.cwd()).resolve()}/"

    def shorter(found: re.Match[str]) -> str:
        path = found.group()
        if path.startswith(base) and len(path) > len(base):
            return path[len(base) :]
        return path.rstrip("/").rpartition("/")[2]

    return _ABSOLUTE.sub(shorter, text)
