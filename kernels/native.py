"""The library's C entry points through ctypes: all that a machine without tvm-ffi needs. For the bench and for tests."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from .compiled import ENCODINGS, stream_of
from .face import Kernels
from .table import DTYPES, PoolTable, RecordForm


class Pool(ctypes.Structure):
    """`histate::Pool` in `csrc/index.cuh`. Strides and sizes in bytes."""

    _fields_ = (
        ("temporal", ctypes.c_void_p),
        ("conv", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layers", "slots", "heads", "rows", "columns")),
        *((f"{piece}_stride", ctypes.c_int64) for piece in ("temporal_layer", "temporal_slot")),
        *((f"{piece}_stride", ctypes.c_int64) for piece in ("conv_layer", "conv_slot")),
        ("conv_bytes", ctypes.c_int64),
        ("temporal_kind", ctypes.c_int32),
        ("conv_kind", ctypes.c_int32),
    )

    @classmethod
    def of(cls, table: PoolTable) -> Pool:
        temporal, conv = table.temporal, table.conv
        strides = [tensor.stride(axis) * tensor.itemsize for tensor in (temporal, conv) for axis in (0, 1)]
        return cls(
            *(temporal.data_ptr(), conv.data_ptr(), *temporal.shape, *strides),
            *(conv[0, 0].numel() * conv.itemsize, DTYPES.index(temporal.dtype), DTYPES.index(conv.dtype)),
        )


def open_library(path: Path) -> Any:
    """Load a library and declare its functions.

    Raises:
        OSError: it cannot be loaded, or was built from sources with another `Pool`.
    """
    library = ctypes.CDLL(str(path))
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.histate_text_of.argtypes, library.histate_text_of.restype = [whole], ctypes.c_char_p
    library.histate_pool_bytes.restype = number
    library.histate_record_bytes.argtypes, library.histate_record_bytes.restype = [pointer, whole], number
    library.histate_pack.argtypes = [
        *(pointer, pointer, whole, number, pointer, number, pointer, whole, number, pointer)
    ]
    library.histate_unpack.argtypes = [
        *(pointer, pointer, whole, pointer, number, pointer, number, number, number, number),
        *(whole, number, pointer),
    ]
    if library.histate_pool_bytes() != ctypes.sizeof(Pool):
        raise OSError(f"{path.name} was built from other sources: build it again")
    return library


class NativeKernels(Kernels):
    """The C entry points of one library, on the current stream."""

    def __init__(self, path: Path, reason: str = "asked for") -> None:
        super().__init__("C", reason)
        self.library = open_library(path)

    def _pack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        flags: torch.Tensor,
        most_blocks: int,
    ) -> None:
        self._raise_if(
            self.library.histate_pack(
                *(ctypes.byref(Pool.of(pool)), slots.data_ptr(), slots.is_cuda, len(slots)),
                *(records.data_ptr(), records.stride(0), flags.data_ptr()),
                *(ENCODINGS[form.codec.encoding], most_blocks, stream_of(pool.device)),
            )
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
        of = (ctypes.c_int64 * len(sources))(*sources)
        self._raise_if(
            self.library.histate_unpack(
                *(ctypes.byref(Pool.of(pool)), slots.data_ptr(), slots.is_cuda, of, len(slots)),
                *(records.data_ptr(), records.stride(0), len(records), layers.start, layers.stop),
                *(ENCODINGS[form.codec.encoding], most_blocks, stream_of(pool.device)),
            )
        )

    def _raise_if(self, code: int) -> None:
        if code:
            text = self.library.histate_text_of(code).decode()
            raise RuntimeError(f"{text} (cudaError {code})" if code > 0 else text)
