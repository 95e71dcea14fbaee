"""Builds the demo model once per version and keeps it in the user's cache directory.

A finished folder holds a manifest with the sha256 of every other file. A folder whose manifest is missing or
does not match was cut short or damaged, and is built anew. Building happens under a lock and in a folder
aside that is renamed in when complete, so that nobody ever sees half a model and two builders do not collide.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

_PACKAGE = Path(__file__).parent
_MANIFEST = "manifest.json"


def ensure_demo_model(cache_dir: Path | None = None) -> Path:
    """Return the folder of the demo model, building it first if it is missing or damaged.

    `cache_dir` defaults to ``$HISTATE_CACHE_DIR``, then ``$XDG_CACHE_HOME/sglang-histate``, then
    ``~/.cache/sglang-histate``. Takes about a second for a build and milliseconds otherwise.

    Raises:
        OSError: if the cache directory cannot be written.
    """
    cache_dir = Path(cache_dir) if cache_dir is not None else _default_cache_dir()
    folder = cache_dir / f"demo-{version_digest()}"
    if _is_intact(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_intact(folder):
            aside = folder.with_suffix(".building")
            for leftover in (aside, folder):
                if leftover.exists():
                    shutil.rmtree(leftover)
            aside.mkdir()
            _build(aside)
            os.rename(aside, folder)
    return folder


def version_digest() -> str:
    """Return 12 hex digits that change whenever this package's code or data does."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.iterdir()):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _default_cache_dir() -> Path:
    if chosen := os.environ.get("HISTATE_CACHE_DIR"):
        return Path(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "sglang-histate"


def _build(folder: Path) -> None:
    """Write all files of the model into the empty `folder`, the manifest last."""
    # Imported here: torch takes seconds, and a model that is already there does not need it.
    from sglang_histate.demo.config import generation_config, model_config
    from sglang_histate.demo.tokenizer import write_tokenizer
    from sglang_histate.demo.weights import write_weights

    (folder / "config.json").write_text(json.dumps(model_config(), indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps(generation_config(), indent=2), encoding="utf-8"
    )
    write_tokenizer(folder)
    write_weights(folder / "model.safetensors")
    (folder / _MANIFEST).write_text(json.dumps(_sha256_by_name(folder), indent=2), encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return expected == _sha256_by_name(folder)
    except (OSError, ValueError):  # absent, unreadable or not JSON
        return False


def _sha256_by_name(folder: Path) -> dict[str, str]:
    """Return file name -> sha256 for everything in `folder` but the manifest."""
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
