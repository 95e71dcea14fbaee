"""Where things lie: our patches, our stand-in package, the installed SGLang, the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from sglang_histate.upstream.errors import UpstreamError

_PACKAGE = Path(__file__).resolve().parent.parent


def sha256(data: bytes) -> str:
    """Return the hexadecimal sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def patches_dir() -> Path:
    """Return the folder with UPSTREAM and the patch groups: a link to /patches in a checkout, real in a
    wheel.
    """
    found = _PACKAGE / "_patches"
    if not (found / "UPSTREAM").is_file():
        raise UpstreamError(f"{found} has no UPSTREAM file: reinstall sglang-histate")
    return found


def stand_in_dir() -> Path:
    """Return the torch stand-in for the CUDA-only `sgl_kernel`; it may not exist in a broken install."""
    return _PACKAGE / "cpu" / "stand_in" / "sgl_kernel"


def package_parent() -> Path:
    """Return the folder that holds `sglang_histate`, against which `used_by` paths in hooks.toml are
    resolved.
    """
    return _PACKAGE.parent


def installed_sglang() -> Path:
    """Return the installed `sglang` package directory, never an overlay of ours.

    The distribution's own record comes first: inside an overlay process the import system would answer with
    the overlay, while the dist-info always lies in site-packages. Editable installs have no files beside it.

    Raises:
        UpstreamError: sglang is not installed.
    """
    try:
        recorded = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang")))
        if (recorded / "__init__.py").is_file():
            return recorded.resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UpstreamError("sglang is not installed: run pip install sglang==" + _pinned_version())
    return Path(spec.origin).resolve().parent


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the absolute cache folder: $HISTATE_CACHE_DIR, $XDG_CACHE_HOME/sglang-histate or
    ~/.cache/sglang-histate.
    """
    env = os.environ if environ is None else environ
    if env.get("HISTATE_CACHE_DIR"):
        return Path(env["HISTATE_CACHE_DIR"]).expanduser().absolute()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]).absolute() / "sglang-histate"
    try:
        return Path.home() / ".cache" / "sglang-histate"
    except RuntimeError as error:
        raise UpstreamError("there is no home directory for the overlay: set HISTATE_CACHE_DIR") from error


def _pinned_version() -> str:
    # Imported here: pin needs this module to find UPSTREAM.
    from sglang_histate.upstream.pin import read_pin

    return read_pin().version
