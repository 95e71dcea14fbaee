"""What must be equal before a stored checkpoint may be used: model, weights, shapes, ranks, page size, hash scheme."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_parallel

from sglang_histate.adapter.state_layout import StateLayout

_HASHED_FILES = ("config.json", "model.safetensors.index.json", "generation_config.json")


def store_identity(ctx: TreeCacheBuildContext, layout: StateLayout, page_size: int) -> dict[str, Any]:
    """Return the identity as JSON values. Another identity is another directory, never a migration."""
    model = ctx.model_config
    parallel = get_parallel()
    return {
        "weights": weights_identity(model.model_path, getattr(model, "revision", None)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "overrides": str(ctx.server_args.json_model_override_args),
        "kv_dtype": str(ctx.params.token_to_kv_pool_allocator.get_kvcache().dtype),
        "state": layout.identity(),
        "page_size": page_size,
        "tp": [ctx.tp_rank, ctx.tp_size],
        "pp": [parallel.pp_rank, parallel.pp_size],
        "hash_scheme": "sglang-sha256-page-chain",
        "sglang": sglang.__version__,
    }


def weights_identity(model_path: str, revision: str | None) -> str:
    """Return a digest of the model's small files and of the names and sizes of its weight files.

    Reading all weights would take minutes; sizes plus the index and config tell models apart, and a local edit of the
    weights in place changes the modification time, which is part of it.
    """
    digest = sha256()
    folder = Path(model_path)
    if not folder.is_dir():
        digest.update(f"{model_path}@{revision}".encode())
        return digest.hexdigest()
    for name in _HASHED_FILES:
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
