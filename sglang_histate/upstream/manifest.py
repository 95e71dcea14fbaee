"""What an overlay says about itself, and the cheap check that it is still so."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream.locations import sha256

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class PatchedFile:
    """sha256 of one patched file, as installed and as patched."""

    pristine: str
    patched: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. It is written last, so a tree that has it is complete."""

    key: str
    version: str
    installed: str  # the pristine package directory
    groups: tuple[str, ...]
    patches: tuple[str, ...]
    files: dict[str, PatchedFile]
    links: dict[str, str]  # path in the overlay -> absolute target

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read(overlay: Path) -> Manifest:
    """Read the manifest of `overlay`.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        raw = json.loads((overlay / MANIFEST).read_text(encoding="utf-8"))
        files = {name: PatchedFile(**row) for name, row in raw.pop("files").items()}
        groups, patches = tuple(raw.pop("groups")), tuple(raw.pop("patches"))
        return Manifest(files=files, groups=groups, patches=patches, **raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from error


def verify(overlay: Path, key: str | None = None) -> str | None:
    """Return why `overlay` must not be used, or None if it is sound.

    Reads the manifest and the few patched files (as installed and as patched) and compares every link's
    target: about a thousand system calls, no walk through the installed package.

    Args:
        key: the identity it must have, if known.
    """
    try:
        manifest = read(overlay)
    except ValueError as error:
        return str(error)
    if key is not None and manifest.key != key:
        return "it was built for other patches or another installation"
    site = Path(manifest.installed).parent
    try:
        for name, hashes in manifest.files.items():
            if sha256((overlay / name).read_bytes()) != hashes.patched:
                return f"its {name} was changed after it was built"
            if sha256((site / name).read_bytes()) != hashes.pristine:
                return f"the installed {name} is no longer the one that was patched"
        for name, link_to in manifest.links.items():
            if os.readlink(overlay / name) != link_to or not os.path.exists(link_to):
                return f"its link {name} is broken"
    except OSError as error:
        return f"a file of it is missing: {error.filename}"
    return None
