"""Page-locked host memory: registered with the CUDA driver where there is one, pageable where that fails.

Registered memory is preferred to driver-allocated memory, which can fail O_DIRECT with EFAULT.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Drivers refuse very large registrations; copies must not span two of them.
_CHUNK_BYTES = 16 << 30


class PinnedMemory:
    """`memory` (a numpy array over anonymous pages), registered in chunks of whole pieces of `piece_bytes`.

    `pinned` is False, after one warning that names `flag`, where the driver refuses: copies then go through pageable
    memory, which is slower. Without a GPU there is nothing to do.
    """

    def __init__(
        self, memory: Any, device: torch.device, *, flag: str, piece_bytes: int = 1, runtime: Any = None
    ) -> None:
        self._ranges: list[int] = []
        self.pinned = False
        self.chunk_bytes = max(1, _CHUNK_BYTES // piece_bytes) * piece_bytes
        if device.type != "cuda":
            return
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        address, size_bytes = memory.ctypes.data, memory.nbytes
        for start in range(0, size_bytes, self.chunk_bytes):
            chunk = min(self.chunk_bytes, size_bytes - start)
            status = int(self._runtime.cudaHostRegister(address + start, chunk, 0))
            if status == 0:
                self._ranges.append(address + start)
                continue
            self.release()
            # The driver also notes the error for whoever asks next, and torch asks after each kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            logger.warning(
                "Could not pin %d bytes of %s (CUDA error %d): they are copied as pageable memory, which is slower",
                size_bytes,
                flag,
                status,
            )
            return
        self.pinned = True

    def release(self) -> None:
        """Unregister. Large registrations otherwise hold up the end of the process."""
        while self._ranges:
            self._runtime.cudaHostUnregister(self._ranges.pop())
        self.pinned = False
