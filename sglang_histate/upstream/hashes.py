"""The recorded hashes of every upstream function that a patch changes or that our code relies on.

`patches/hooks.toml` lists what we rely on without patching; what the patches change is found from their
hunks. `patches/hashes.json` maps ``module:scope`` to the sha256 of its source at the time someone last read
it.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream import diff
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.locations import patches_dir
from sglang_histate.upstream.scopes import Scopes, touched
from sglang_histate.upstream.series import Patch
from sglang_histate.upstream.tree import read_source


@dataclass(frozen=True)
class Recorded:
    """One line of hashes.json."""

    digest: str  # sha256 of the source
    read_by: tuple[str, ...]  # the patches and files of ours to re-read when it changes


def read_hooks(folder: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Return ``module:scope`` -> our files that rely on it, from hooks.toml.

    Raises:
        UpstreamError: the file is malformed.
    """
    path = (patches_dir() if folder is None else folder) / "hooks.toml"
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("hooks", {})
    except (OSError, ValueError) as error:
        raise UpstreamError(f"patches/hooks.toml cannot be read: {error}") from error
    hooks = {}
    for name, users in table.items():
        files = (users,) if isinstance(users, str) else tuple(users)
        if (
            not name.startswith("sglang")
            or name.count(":") != 1
            or not all(isinstance(f, str) for f in files)
        ):
            raise UpstreamError(
                f'patches/hooks.toml: {name!r} is not "sglang.module:name" = our file or files'
            )
        hooks[name] = files
    return hooks


def read_recorded(folder: Path | None = None) -> dict[str, Recorded]:
    """Return what hashes.json records per ``module:scope``; empty if it does not exist yet.

    Raises:
        UpstreamError: the file is damaged.
    """
    path = (patches_dir() if folder is None else folder) / "hashes.json"
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["functions"]
        return {name: Recorded(row["sha256"], tuple(row["read_by"])) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UpstreamError("patches/hashes.json is damaged: run histate patches record") from error


def write_recorded(functions: Mapping[str, Recorded], version: str, folder: Path | None = None) -> Path:
    """Write `functions` as hashes.json and return its path.

    Raises:
        UpstreamError: the folder is not writable.
    """
    path = (patches_dir() if folder is None else folder) / "hashes.json"
    rows = {name: {"sha256": row.digest, "read_by": row.read_by} for name, row in sorted(functions.items())}
    try:
        path.write_text(
            json.dumps({"upstream": version, "functions": rows}, indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise UpstreamError(f"cannot write {path}: {error.strerror}") from error
    return path


def patched_scopes(patches: Sequence[Patch], root: Path) -> dict[str, set[str]]:
    """Return ``module:scope`` -> labels of the patches of one group that change it.

    Raises:
        UpstreamError: a patch does not apply to `root`.
    """
    found: dict[str, set[str]] = {}
    current: dict[str, str] = {}
    for patch in patches:
        for file_diff in patch.files:
            path = file_diff.path
            source = read_source(root, path)
            before = current.get(path, source)
            current[path] = diff.apply(file_diff, before, patch.label)
            if not path.endswith(".py"):
                continue
            known = _scopes(source, path)
            for scope in touched(file_diff, _scopes(before, path), _scopes(current[path], path), known):
                found.setdefault(f"{_module(path)}:{scope}", set()).add(patch.label)
    return found


def digests(names: Sequence[str], root: Path) -> dict[str, str | None]:
    """Return the current sha256 of each ``module:scope`` under `root`, None where it no longer exists."""
    parsed: dict[str, Scopes | None] = {}
    result: dict[str, str | None] = {}
    for name in names:
        module, _, scope = name.partition(":")
        if module not in parsed:
            path = _path(module, root)
            parsed[module] = None if path is None else _scopes(read_source(root, path), path)
        scopes = parsed[module]
        result[name] = scopes.digest(scope) if scopes is not None and scope in scopes else None
    return result


@functools.lru_cache(maxsize=64)
def _scopes(source: str, path: str) -> Scopes:
    """Parse once: the same large file is asked for by several patches and gates."""
    return Scopes(source, path)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _path(module: str, root: Path) -> str | None:
    base = module.replace(".", "/")
    return next((p for p in (base + ".py", base + "/__init__.py") if (root / p).is_file()), None)
