"""SGLang's transfers between device and host, with indices read beside the forward pass instead of behind it.

A copy starts behind what the scheduler queued and behind the forward pass, which may still use the rows; each layer of
the next forward pass waits for its own event. That is SGLang's. But plans are made on the host, from numbers that lie on
the device, and SGLang would fetch them on the stream of the copy: the scheduler thread would wait for the forward pass.
Here they are fetched on a stream that waits for what the scheduler queued alone, which is some microseconds of work.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine


class ArenaTransfers(L2TransferEngine):
    """See the module."""

    def __init__(self, io_backend: str) -> None:
        super().__init__(io_backend)
        self._index_stream = l2_transfer.device_module.Stream()
        self._started: Any = None  # event of the submission that is being made

    def _start_event(self, start_event: Any) -> Any:  # type: ignore[override]
        self._started = L2TransferEngine._start_event(start_event)
        return self._started

    def _prepare_transfers(self, transfers: list[L2Transfer]) -> list[L2Transfer]:
        self._index_stream.wait_event(self._started)
        with l2_transfer.device_module.stream(self._index_stream):
            return super()._prepare_transfers(transfers)

    def drain(self) -> None:
        """Wait until nothing is on its way any more: before the tree is emptied, the host is saved or unpinned."""
        for stream in (self.device_to_host_stream, self.host_to_device_stream):
            # SGLang's stand-in for streams on a CPU has nothing to wait for.
            synchronize = getattr(stream, "synchronize", None)
            if synchronize is not None:
                synchronize()
