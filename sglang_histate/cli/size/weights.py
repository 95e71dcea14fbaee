"""How many bytes a model's weights take: what its files say, or an estimate from its shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_histate.cli.size.bytes import DTYPE_BYTES
from sglang_histate.cli.size.model import ModelShape

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """Bytes over all ranks, and where the figure comes from."""

    size_bytes: int
    source: str


def weights_of(path: Path, shape: ModelShape, dtype: str) -> Weights:
    """Return the bytes of the weights of the model at `path`, a folder or a config.json."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return Weights(sum(file.stat().st_size for file in files), "its safetensors files")
    try:
        index: Any = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        total = index["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        total = None
    if isinstance(total, int):
        return Weights(total, f"its {_INDEX}")
    return Weights(shape.all_weights * DTYPE_BYTES[dtype], f"its shape, all in {dtype}")
