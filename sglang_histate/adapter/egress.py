"""The way of captured states from the device into host records, beside the forward pass.

On CUDA a side stream waits for the layer that produced the states and copies while later layers run; the forward
stream never waits. The sources are fresh tensors, so the caching allocator keeps them until the side stream is done.
On the CPU engine the copy is a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class LayerEgress:
    """Copies ``source[i]`` into ``targets[i]``; `record` and `query` tell when everything so far has arrived."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy rows of `source` ``[n, ...]`` into n host tensors of the same shape and dtype."""
        if self._stream is None:
            for row, target in zip(source.unbind(0), targets, strict=True):
                target.copy_(row)
            return
        produced = torch.cuda.Event()
        produced.record()
        self._stream.wait_event(produced)
        with torch.cuda.stream(self._stream):
            for row, target in zip(source.unbind(0), targets, strict=True):
                target.copy_(row, non_blocking=True)
        source.record_stream(self._stream)

    def wait_for(self, *streams: Any) -> None:
        """Make later copies wait for what is queued on `streams` now."""
        assert self._stream is not None
        for stream in streams:
            self._stream.wait_stream(stream)

    def on_stream(self) -> Any:
        """Return a context in which work is queued on the side stream; its tensors belong to that stream."""
        assert self._stream is not None
        return torch.cuda.stream(self._stream)

    def drain(self) -> None:
        """Wait until all copies so far have arrived. For `/flush_cache` only, when the server is idle."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self) -> Any:
        """Return a mark behind all copies so far; None where copies are immediate."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @staticmethod
    def query(event: Any) -> bool:
        return event is None or event.query()
