"""`pack` and `unpack` by a compiled library, through tvm-ffi."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sglang_histate.config import CheckpointDtype

from .face import Kernels
from .table import PoolTable, RecordForm

# As in `csrc/index.cuh`.
ENCODINGS = {CheckpointDtype.NATIVE: 0, CheckpointDtype.BF16: 1, CheckpointDtype.INT8: 2}


class CompiledKernels(Kernels):
    """One or two launches for up to 64 slots."""

    def __init__(self, library: Path, name: str, reason: str) -> None:
        """Load `library`. Raises ImportError without tvm-ffi, and what the system says of a library it cannot load."""
        super().__init__(name, reason)
        import tvm_ffi

        self._module: Any = tvm_ffi.load_module(str(library))

    def _pack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        flags: torch.Tensor,
        most_blocks: int,
    ) -> None:
        with _on(pool.device):
            self._module.pack(
                *(pool.temporal, pool.conv, slots, records, flags),
                *(ENCODINGS[form.codec.encoding], most_blocks, stream_of(pool.device)),
            )

    def _unpack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        sources: list[int],
        layers: range,
        most_blocks: int,
    ) -> None:
        of = torch.tensor(sources, dtype=torch.int64)
        with _on(pool.device):
            self._module.unpack(
                *(pool.temporal, pool.conv, slots, of, records, layers.start, layers.stop),
                *(ENCODINGS[form.codec.encoding], most_blocks, stream_of(pool.device)),
            )


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream, 0 without a GPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
