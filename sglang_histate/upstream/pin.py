"""The pin: which SGLang release the patches are written against, and whether it is the installed one."""

from __future__ import annotations

import base64
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.locations import patches_dir, sha256


@dataclass(frozen=True)
class Pin:
    """What patches/UPSTREAM says."""

    package: str
    version: str
    wheels: tuple[tuple[str, str], ...]  # (file name, sha256), one per platform and Python version


def read_pin(folder: Path | None = None) -> Pin:
    """Read UPSTREAM from `folder` (default: the shipped patches).

    Raises:
        UpstreamError: a line is not understood, or package, version or wheel is missing.
    """
    path = (patches_dir() if folder is None else folder) / "UPSTREAM"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UpstreamError(f"cannot read the pin {path}: {error.strerror}") from error
    fields: dict[str, str] = {}
    wheels: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        words = value.split()
        if colon and name == "wheel" and len(words) == 2 and len(words[1]) == 64:
            wheels.append((words[0], words[1]))
        elif colon and name in ("package", "version") and len(words) == 1 and name not in fields:
            fields[name] = words[0]
        else:
            raise UpstreamError(f"{path.name} line {number} is not understood: {line!r}")
    if len(fields) != 2 or not wheels:
        raise UpstreamError(f"{path.name} must name package, version and at least one wheel")
    return Pin(fields["package"], fields["version"], tuple(wheels))


def installed_version(package: str = "sglang") -> str | None:
    """Return the installed version of `package`, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(pin: Pin | None = None, found: str | None = None) -> Pin:
    """Return the pin if the installed release is the pinned one.

    Args:
        pin: the wanted release; default is the shipped one.
        found: the version to compare; default is the installed one.

    Raises:
        UpstreamError: wrong or missing release; the sentence names both versions and the way out.
    """
    wanted = read_pin() if pin is None else pin
    version = installed_version(wanted.package) if found is None else found
    if version != wanted.version:
        state = "is not installed" if version is None else f"{version} is installed"
        raise UpstreamError(
            f"{wanted.package} {state} but HiState needs exactly {wanted.version}: "
            f"run pip install {wanted.package}=={wanted.version}"
        )
    return wanted


def check_pristine(installed: Path, files: list[str]) -> None:
    """Compare `files` (such as ``sglang/srt/server_args.py``) of the installed package with the wheel's own
    RECORD.

    An install without such a RECORD (an editable one, a copied tree) passes: the patches' zero fuzz still
    guards it.

    Raises:
        UpstreamError: a file was changed after the wheel was installed.
    """
    recorded = _record(installed.parent)
    for name in files:
        if name in recorded and recorded[name] != sha256((installed.parent / name).read_bytes()):
            raise UpstreamError(
                f"the installed {name} was changed after installation: run "
                f"pip install --force-reinstall --no-deps sglang=={read_pin().version}"
            )


def _record(site: Path) -> dict[str, str]:
    """Return path -> sha256 from sglang's RECORD if it describes the files in `site`."""
    try:
        distribution = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError:
        return {}
    if Path(str(distribution.locate_file(""))).resolve() != site.resolve():
        return {}
    hashes = {}
    for entry in distribution.files or ():
        if entry.hash is not None and entry.hash.mode == "sha256":
            padded = entry.hash.value + "=" * (-len(entry.hash.value) % 4)
            hashes[entry.as_posix()] = base64.urlsafe_b64decode(padded).hex()
    return hashes
