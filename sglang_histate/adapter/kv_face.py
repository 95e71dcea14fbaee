"""The KV face of the host arena: token indices as HiCache hands them out, one arena page per page of tokens.

Token t of page p has index ``p * page_size + t``. What lies where in a page is in `copy.kv_pages`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, MHABufferInfo

from sglang_histate.adapter.arena_face import ArenaFace, SharedArena
from sglang_histate.copy.checkpoints import Direction, layer_groups
from sglang_histate.copy.kv_pages import KvPlans
from sglang_histate.copy.plan import Offsets
from sglang_histate.copy.rows import DeviceRows, as_rows
from sglang_histate.pool import Kind
from sglang_histate.pool.arena import PageError


def kv_page_bytes(info: MHABufferInfo, page_size: int) -> int:
    """Return the bytes of one page over all layers, K and V, without any padding between rows on the device."""
    rows = [layer[0] for layer in (*info.buffers.k, *info.buffers.v)]
    return page_size * sum(row.numel() * row.element_size() for row in rows)


def holds_plain_rows(info: Any) -> bool:
    """Return True for pools of plain rows: one per token, all of it KV, and where it was when the server started."""
    return (
        isinstance(info, MHABufferInfo)
        and info.buffers.layout is KVBufferLayout.NHD
        and info.scales is None
        and info.transfer_buffers is None
    )


class KvFace(ArenaFace):
    """Raises PageError for indices that are not whole pages which KV holds."""

    kind = Kind.KV

    def __init__(self, shared: SharedArena, info: MHABufferInfo, *, page_size: int, layout: str) -> None:
        assert shared.arena.page_bytes == kv_page_bytes(info, page_size)
        super().__init__(
            shared,
            label="kv",
            page_size=page_size,
            size=shared.arena.total_pages * page_size,
            size_per_token=shared.arena.page_bytes // page_size,
            layer_num=len(info.buffers.k),
            dtype=info.dtype,
            layout=layout,
        )
        self.kv_buffer = [shared.memory]
        self._plans = KvPlans(
            [
                [DeviceRows.of(half, "the device's KV") for half in halves]
                for halves in zip(info.buffers.k, info.buffers.v, strict=True)
            ],
            page_size,
            shared.arena.page_bytes,
        )

    @property
    def logical_size(self) -> int:
        """What KV holds or could have now. SGLang's metrics take what is missing from it as used."""
        return self.arena.used_pages(self.kind) * self.page_size + self.available_size()

    def available_size(self) -> int:
        return self.arena.free_pages * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        assert need_size % self.page_size == 0, f"{need_size} tokens are not whole pages of {self.page_size}"
        pages = self.shared.take(need_size // self.page_size, self.kind)
        if pages is None:
            return None
        starts = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (starts + torch.arange(self.page_size)).flatten()

    def free(self, indices: torch.Tensor) -> int:
        with self.lock:
            self.arena.free(self._pages(indices).tolist(), self.kind)
        return len(indices)

    def clear(self) -> None:
        with self.lock:
            self.arena.clear(self.kind)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        pages, tokens = self._pages(host_indices), as_rows(device_indices)
        for group in layer_groups(self.layer_num):
            self.shared.engine.submit(
                [
                    copy
                    for layer in group
                    for copy in self._plans.transfers(
                        self.shared.space, pages, tokens, layer, Direction.TO_HOST
                    )
                ]
            )

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        pages, tokens = self._pages(host_indices), as_rows(device_indices)
        self.shared.engine.submit(
            self._plans.transfers(self.shared.space, pages, tokens, layer_id, Direction.TO_DEVICE)
        )

    def _pages(self, indices: torch.Tensor) -> Offsets:
        """Return the pages that `indices` name in order, whole."""
        rows = as_rows(indices)
        if len(rows) % self.page_size:
            raise PageError(f"{len(rows)} tokens are not whole pages of {self.page_size}")
        grid = rows.reshape(-1, self.page_size)
        if len(grid) and (
            (grid[:, 0] % self.page_size).any() or (grid[:, -1] - grid[:, 0] != self.page_size - 1).any()
        ):
            raise PageError("tokens that are not whole pages in order")
        return grid[:, 0] // self.page_size
