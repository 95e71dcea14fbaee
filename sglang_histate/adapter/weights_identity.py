"""Which weights a server computes with, as a digest that is the same wherever and whenever the same ones are loaded."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

# What decides how weights are read and computed with. Small, so read as a whole.
_HASHED_FILES = (
    "adapter_config.json",
    "config.json",
    "hf_quant_config.json",
    "params.json",
    "quant_model_description.json",
    "quantize_config.json",
)
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def weights_identity(model_path: str, revision: str | None) -> str:
    """Return a digest of the model's small files and of the names, sizes and times of its weight files.

    Reading all weights would take minutes; sizes plus the index and config tell models apart, and a local edit of the
    weights in place changes the modification time, which is part of it. A model of the Hugging Face hub is its commit: a
    branch that moved is another model.
    """
    digest = sha256()
    path = Path(model_path)
    if path.is_file():
        _add_times(digest, [path])
    elif path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file() and (file.name in _HASHED_FILES or file.name.endswith(".index.json")):
                digest.update(file.name.encode() + b"\0" + sha256(file.read_bytes()).digest())
        _add_times(digest, sorted(file for pattern in _WEIGHT_FILES for file in path.glob(pattern)))
    else:
        digest.update(f"{model_path}@{hub_commit(model_path, revision) or revision}".encode())
    return digest.hexdigest()


def hub_commit(repository: str, revision: str | None) -> str | None:
    """Return the commit of a hub model as it lies in the local cache, None if it does not: then it cannot be told."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def adapters_identity(lora_paths: Any) -> list[list[str]]:
    """Return name and weights of each LoRA adapter that the server starts with, sorted.

    Requests name an adapter by a hash of its name and path, which are the same after its weights have changed.
    """
    return sorted([name, path, weights_identity(path, None)] for name, path in _adapters(lora_paths))


def _adapters(lora_paths: Any) -> list[tuple[str, str]]:
    """Return (name, path) of each adapter, from any form in which SGLang takes and keeps them."""
    if not lora_paths:
        return []
    if isinstance(lora_paths, dict):
        return [(str(name), str(getattr(one, "lora_path", one))) for name, one in lora_paths.items()]
    found = []
    for one in lora_paths:
        if isinstance(one, str):
            name, equals, path = one.partition("=")
            found.append((name, path if equals else name))
        elif isinstance(one, dict):
            found.append((str(one["lora_name"]), str(one["lora_path"])))
        else:
            found.append((str(one.lora_name), str(one.lora_path)))
    return found


def canonical_json(text: str | None) -> Any:
    """Return the value of a flag that takes JSON, so that spaces and the order of keys make no difference."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def _add_times(digest: Any, files: list[Path]) -> None:
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
