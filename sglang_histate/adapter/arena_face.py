"""The host arena as SGLang sees it: one allocation domain with two faces, each a host pool of HiCache.

SGLang has a seam for host pools that share memory (`shared_allocation_domain`): it then asks the domain for what a
backup needs, all or nothing. Pages of the arena never move, so what that seam calls a layout lease has nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from sglang_histate.adapter.pinning import PinnedMemory
from sglang_histate.copy import CopyEngine, Space, host_engine
from sglang_histate.pool import HostArena, Kind


class SharedArena:
    """The arena, its bytes as a tensor, and the way to make room in it.

    `make_room(pages)` evicts until that many more pages are free, if it can. Alike on all ranks, because the
    arena's contents are. `engine` moves bytes between it and the device.
    """

    def __init__(
        self, arena: HostArena, device: torch.device, make_room: Callable[[int], None], engine: CopyEngine
    ) -> None:
        self.arena = arena
        self.memory = torch.from_numpy(arena.memory)
        self.engine = engine
        self.host_engine = host_engine()
        self.lock = threading.RLock()
        self.faces: dict[str, ArenaFace] = {}
        self._make_room = make_room
        self._pin = PinnedMemory(
            arena.memory, device, flag="--histate-host-size", piece_bytes=arena.page_bytes
        )
        self.space = Space(
            "the host arena", self.memory, pinned=self._pin.pinned, chunk_bytes=self._pin.chunk_bytes
        )

    @property
    def pinned(self) -> bool:
        return self._pin.pinned

    def take(self, count: int, kind: Kind) -> list[int] | None:
        """Return `count` pages, evicting if need be; None if there is no room even so."""
        with self.lock:
            pages = self.arena.allocate(count, kind)
            if pages is None and count <= self.arena.total_pages:
                self._make_room(count - self.arena.free_pages)
                pages = self.arena.allocate(count, kind)
            return pages

    def alloc_many(self, requests: Sequence[tuple[str, int]]) -> list[torch.Tensor] | None:
        """Serve (face label, size) requests, all or none."""
        with self.lock:
            done: list[tuple[ArenaFace, torch.Tensor]] = []
            for label, size in requests:
                face = self.faces[label]
                indices = face.alloc(size)
                if indices is None:
                    for held, given in done:
                        held.free(given)
                    return None
                done.append((face, indices))
            return [indices for _, indices in done]

    def free_bytes(self) -> int:
        return self.arena.free_bytes

    def acquire_layout(self) -> None:
        """Nothing moves."""

    def release_layout(self, event: Any = None, key: Any = None) -> None:
        """Nothing moves."""

    def release(self) -> None:
        """Unpin. Nobody may copy any more."""
        self._pin.release()


class ArenaFace(HostKVCache):
    """What both faces share. Sizes and indices are in tokens (KV) or slots (states).

    The base class allocates memory of its own when it is constructed, so its constructor is not called.
    """

    kind: Kind

    def __init__(
        self,
        shared: SharedArena,
        *,
        label: str,
        page_size: int,
        size: int,
        size_per_token: int,
        layer_num: int,
        dtype: torch.dtype,
        layout: str,
    ) -> None:
        self.shared = shared
        self.shared_allocation_domain = shared
        self.arena = shared.arena
        self.lock = shared.lock
        self.pool_label = label
        self.page_size = page_size
        self.size = size
        self.page_num = size // page_size
        self.size_per_token = size_per_token
        self.start_layer, self.end_layer = 0, layer_num
        self.layer_num = self.target_layer_num = layer_num
        self.dtype = dtype
        # Both orders of SGLang are served alike: what it calls layout only says on which device it keeps the indices.
        self.layout = layout
        self.device = "cpu"
        self.pin_memory = shared.pinned
        self.can_use_write_back_jit = False
        self.kv_buffer: Any = []
        shared.faces[label] = self

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def prepare_transfer_indices(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring both to the host once per submission: plans are made there, whatever the backend."""
        return host_indices.cpu(), device_indices.cpu()

    def destroy(self) -> None:
        self.shared.release()

    def init_kv_buffer(self) -> Any:
        return self.kv_buffer

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError("HiState is its own storage tier")

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        raise NotImplementedError("HiState is its own storage tier")

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise NotImplementedError("HiState is its own storage tier")
