"""The way of captured states from the device into host records, beside the forward pass.

On CUDA a side stream waits for the layer that produced the states, encodes them and copies while later layers run; the
forward stream never waits. The sources are fresh tensors, so the caching allocator keeps them until the side stream is
done. On the CPU engine a copy is a plain one, and states that are not stored as they are go through a thread, which
encodes all of a forward pass once it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import TemporalCodec

_Job = tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]


class LayerEgress:
    """Copies ``source[i]`` into ``targets[i]``; `record` and `query` tell when everything so far has arrived."""

    def __init__(self, device: torch.device, codec: TemporalCodec) -> None:
        """`codec` is the encoding of the temporal states."""
        self._codec = codec
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[_Job] = []
        self._newest: Future[None] | None = None
        if self._stream is None and codec.encoding is not CheckpointDtype.NATIVE:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="histate-encode")

    def copy(self, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy rows of `source` ``[n, ...]`` into n host tensors of the same shape and dtype."""
        if self._stream is None:
            for row, target in zip(source.unbind(0), targets, strict=True):
                target.copy_(row)
            return
        with self._after_current():
            for row, target in zip(source.unbind(0), targets, strict=True):
                target.copy_(row, non_blocking=True)
        source.record_stream(self._stream)

    def encode(self, states: torch.Tensor, targets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Encode temporal states ``[n, HV, V, K]``, each into the parts of one of n records.

        Nothing may change `states` before the next mark (`record`) has been reached.
        """
        if self._thread is not None:
            self._jobs.append((states, targets))
            return
        if self._stream is None:
            self._encode(states, targets)
            return
        with self._after_current():
            self._encode(states, targets)
        states.record_stream(self._stream)

    def _encode(self, states: torch.Tensor, targets: Sequence[Sequence[torch.Tensor]]) -> None:
        by_record = zip(*(part.unbind(0) for part in self._codec.encode(states)), strict=True)
        for parts, target in zip(by_record, targets, strict=True):
            for part, place in zip(parts, target, strict=True):
                place.copy_(part, non_blocking=True)

    @torch.inference_mode()
    def _encode_all(self, jobs: list[_Job]) -> None:
        for states, targets in jobs:
            self._encode(states, targets)

    def _after_current(self) -> Any:
        """Return a context in which work is queued on the side stream, behind what the current stream has so far."""
        assert self._stream is not None
        produced = torch.cuda.Event()
        produced.record()
        self._stream.wait_event(produced)
        return torch.cuda.stream(self._stream)

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
        self._jobs.clear()
        if self._newest is not None:
            self._newest.exception()

    def record(self) -> Any:
        """Return a mark behind all copies so far; None where copies are immediate."""
        if self._thread is not None:
            if self._jobs:
                jobs, self._jobs = self._jobs, []
                self._newest = self._thread.submit(self._encode_all, jobs)
            return self._newest
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @staticmethod
    def query(mark: Any) -> bool:
        """Return True once `mark` has been reached. What went wrong in the thread is raised here."""
        if mark is None:
            return True
        if isinstance(mark, Future):
            return mark.done() and mark.result() is None
        return bool(mark.query())
