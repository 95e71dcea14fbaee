"""How much host memory this process may still take: what the machine has free, and what its container allows.

A container's limit is not in /proc/meminfo. Both cgroup versions are read, every level from the process's own group
up to the mount, and the tightest counts. Page cache is reclaimable and does not count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.config import ConfigError
from sglang_histate.sizes import format_size


@dataclass(frozen=True)
class Headroom:
    """Bytes that may still be taken, and what says so, in words for a message."""

    size_bytes: int
    source: str


def available_memory(root: Path = Path("/")) -> Headroom:
    """Return the least of the machine's available memory and the headroom of each memory cgroup above the process.

    `root` stands for ``/`` in tests. What cannot be read sets no limit.
    """
    found = [Headroom(1 << 62, "no limit found")]
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append(Headroom(int(rest.split()[0]) << 10, "available on this machine"))
    for directory, names, cache in _groups(root):
        limit, used = _number(directory / names[0]), _number(directory / names[1])
        if limit is None or used is None:
            continue
        reclaimable = sum(
            int(line.split()[1]) for line in _lines(directory / "memory.stat") if line.split()[0] in cache
        )
        free = max(0, limit - max(0, used - reclaimable))
        found.append(Headroom(free, f"left of the container's limit of {format_size(limit)}"))
    return min(found, key=lambda headroom: headroom.size_bytes)


def check_host_size(size_bytes: int | None, nodes: int = 1, root: Path = Path("/")) -> None:
    """Refuse a total for all ranks of which this machine cannot hold its share.

    Raises:
        ConfigError: one sentence with flag, value, limit and the way out.
    """
    if size_bytes is None:
        return
    headroom = available_memory(root)
    if size_bytes // nodes > headroom.size_bytes:
        raise ConfigError(
            f"--histate-host-size {format_size(size_bytes)} is more than this server can get: "
            f"{format_size(headroom.size_bytes)} are {headroom.source}, give at most {format_size(headroom.size_bytes * nodes)}, "
            "less what the server itself needs"
        )


_V2 = (("memory.max", "memory.current"), ("inactive_file", "active_file"))
_V1 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("total_inactive_file", "total_active_file"),
)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str], tuple[str, ...]]]:
    """Yield each cgroup directory above the process with the names of its files and of its page cache counters."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, (files, cache) = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, (files, cache) = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # Where the container does not see its own place in the hierarchy, its group is mounted as the root.
        directory = mount / path.strip("/")
        for level in (directory, *directory.parents):
            if level.is_relative_to(mount):
                yield level, files, cache


def _number(path: Path) -> int | None:
    """Return the number in a file of one line; None for no file, no number, or "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        return []
