"""Patch groups: a folder with a `series` file that gives the order, and one patch per seam with a DEP-3
style header.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream import diff
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.locations import patches_dir
from sglang_histate.upstream.pin import read_pin

GROUPS = ("cpu", "histate")  # in build order
REQUIRED_FIELDS = ("Description", "Why-not-a-subclass", "Upstream", "Last-Verified")


@dataclass(frozen=True)
class Patch:
    """One patch file, read and checked."""

    group: str
    name: str  # file name, such as mamba-capture-hook.patch
    header: dict[str, str]  # DEP-3 fields, continuation lines joined with a space
    files: tuple[diff.FileDiff, ...]
    text: str

    @property
    def label(self) -> str:
        """How errors and lists call the patch, such as ``patches/histate/mamba-capture-hook.patch``."""
        return f"patches/{self.group}/{self.name}"


def read_series(group: str, folder: Path | None = None) -> tuple[str, ...]:
    """Return the patch names that `group`'s series lists, in order.

    Raises:
        UpstreamError: there is no such group, or a name is listed twice.
    """
    path = (patches_dir() if folder is None else folder) / group / "series"
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UpstreamError(f"patches/{group}/series cannot be read: {error.strerror}") from error
    names = [row.strip() for row in rows if row.strip() and not row.lstrip().startswith("#")]
    for name in names:
        if names.count(name) > 1:
            raise UpstreamError(f"patches/{group}/series lists {name} twice")
        if "/" in name or not name.endswith(".patch"):
            raise UpstreamError(f"patches/{group}/series lists {name!r}, which is not a *.patch name")
    return tuple(names)


def check_folder(group: str, folder: Path | None = None) -> None:
    """Series and folder must agree: every listed patch exists, every patch is listed, nothing else lies
    there.

    Raises:
        UpstreamError: names the first file that is missing or left over.
    """
    base = (patches_dir() if folder is None else folder) / group
    listed = read_series(group, folder)
    present = sorted(path.name for path in base.iterdir())
    for name in listed:
        if name not in present:
            raise UpstreamError(f"patches/{group}/series lists {name}, which does not exist")
    for name in present:
        if name != "series" and name not in listed:
            raise UpstreamError(f"patches/{group}/{name} is not listed in patches/{group}/series")


def read_group(group: str, folder: Path | None = None) -> tuple[Patch, ...]:
    """Return the patches of `group` in series order.

    Raises:
        UpstreamError: a patch is missing or malformed, or its header is incomplete.
    """
    base = patches_dir() if folder is None else folder
    version = read_pin(base).version
    return tuple(_read_patch(base, group, name, version) for name in read_series(group, folder))


def parse_patch(text: str, group: str, name: str, version: str) -> Patch:
    """Split `text` into header and diff and check both.

    Args:
        version: the pinned release, which Last-Verified must name.

    Raises:
        UpstreamError: names the patch and what is wrong with it.
    """
    label = f"patches/{group}/{name}"
    rows = text.split("\n")
    start = next((i for i, row in enumerate(rows) if row.startswith(("--- ", "diff "))), len(rows))
    header = _parse_header(rows[:start], label)
    for field in REQUIRED_FIELDS:
        if not header.get(field):
            raise UpstreamError(f"{label} has no {field} field in its header")
    if header["Last-Verified"] != version:
        raise UpstreamError(
            f"{label} was last verified on {header['Last-Verified']}, but the pin is {version}"
        )
    return Patch(group, name, header, diff.parse("\n".join(rows[start:]), label, start + 1), text)


def _read_patch(base: Path, group: str, name: str, version: str) -> Patch:
    try:
        text = (base / group / name).read_bytes().decode("utf-8")
    except OSError as error:
        raise UpstreamError(f"patches/{group}/{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UpstreamError(f"patches/{group}/{name} is not UTF-8 text") from error
    return parse_patch(text, group, name, version)


def _parse_header(rows: list[str], label: str) -> dict[str, str]:
    """Parse ``Field: value`` rows; a row that starts with a space continues the field above."""
    header: dict[str, str] = {}
    last = ""
    for number, row in enumerate(rows, 1):
        if not row.strip() or row.rstrip() == "---":
            last = ""
        elif row[0] in " \t" and last:
            header[last] += " " + row.strip()
        else:
            name, colon, value = row.partition(":")
            if not colon or " " in name or name in header:
                raise UpstreamError(f"{label} line {number}: not a header field: {row!r}")
            header[name] = value.strip()
            last = name
    return {name: value.strip() for name, value in header.items()}
