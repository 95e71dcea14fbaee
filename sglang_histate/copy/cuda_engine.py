"""The two engines that call CUDA themselves, through cuda.bindings: one batch call, or a loop of single ones.

The batch call moves a whole layer group without a kernel, so no multiprocessor is taken from the model. It has rules,
each of which somebody paid for: never on the legacy default stream, not inside a graph capture (the copy would silently
be missing), no empty pieces, a bounded number of them, and its return code is checked every time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_histate.copy.engine import CopyEngine, CopyError
from sglang_histate.copy.transfer import Copy, Descriptors, Move, Transfer, descriptors

logger = logging.getLogger(__name__)

_LEGACY_STREAMS = (0, 1)  # no stream at all, and cudaStreamLegacy


class Driver(Protocol):
    """What the engines need of the CUDA runtime. Return codes are ints, 0 is success."""

    def stream(self) -> int:
        """Return the handle of the current stream, 0 for the legacy default one."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""

    def batch(self, found: Descriptors, stream: int) -> int: ...

    def single(self, source: int, target: int, size: int, stream: int) -> int: ...

    def is_invalid_value(self, code: int) -> bool: ...


class CudaDriver:
    """cuda.bindings.runtime, and torch for which stream is current.

    `runtime` and `streams` stand for the modules in tests.
    """

    def __init__(self, runtime: Any, streams: Any = torch.cuda) -> None:
        self._runtime = runtime
        self._streams = streams
        # Sources are written by earlier work of the same stream: they may be read in its order, not before.
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = 0
        self._attributes = [attributes]

    def stream(self) -> int:
        return int(self._streams.current_stream().cuda_stream)

    def capturing(self) -> bool:
        return bool(self._streams.is_current_stream_capturing())

    def batch(self, found: Descriptors, stream: int) -> int:
        # One set of attributes for all pieces: numAttrs is 1, and attrsIdxs has as many entries as there are sets, the
        # first of which is 0. An entry for each piece is not valid, because entries have to increase.
        result = self._runtime.cudaMemcpyBatchAsync(
            found.targets.tolist(),
            found.sources.tolist(),
            found.sizes.tolist(),
            len(found),
            self._attributes,
            [0],
            1,
            stream,
        )
        return int(result[0])

    def single(self, source: int, target: int, size: int, stream: int) -> int:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        return int(self._runtime.cudaMemcpyAsync(target, source, size, kind, stream)[0])

    def is_invalid_value(self, code: int) -> bool:
        return code == int(self._runtime.cudaError_t.cudaErrorInvalidValue)


class LoopEngine(CopyEngine):
    """A cudaMemcpyAsync for each piece: about 2 microseconds of the calling thread each. Works wherever CUDA does."""

    name = "cudaMemcpyAsync"

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def submit(self, copies: Sequence[Copy]) -> None:
        found, stream = descriptors(copies), _stream_for(self._driver, self.name)
        self.run(found, stream)

    def run(self, found: Descriptors, stream: int) -> None:
        """Copy what has been checked already."""
        pieces = zip(found.sources.tolist(), found.targets.tolist(), found.sizes.tolist(), strict=True)
        for number, (source, target, size) in enumerate(pieces):
            code = self._driver.single(source, target, size, stream)
            if code != 0:
                raise CopyError(
                    f"cudaMemcpyAsync of {size} bytes failed with CUDA error {code} (piece {number} of {len(found)})"
                )


class BatchEngine(CopyEngine):
    """One cudaMemcpyBatchAsync for up to `MAX_DESCRIPTORS` pieces.

    A call that the driver calls invalid has queued nothing: it is made again by the loop, and so is every later one.
    Host memory that is not pinned goes by the loop too.
    """

    name = "cudaMemcpyBatchAsync"

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = LoopEngine(driver)
        self._fallback: str | None = None

    @property
    def fallback(self) -> str | None:
        return self._fallback

    def submit(self, copies: Sequence[Copy]) -> None:
        found, stream = descriptors(copies), _stream_for(self._driver, self.name)
        if self._fallback is not None or not all(_is_pinned(copy) for copy in copies):
            self._loop.run(found, stream)
            return
        for call in found.calls():
            self._call(call, stream)

    def _call(self, call: Descriptors, stream: int) -> None:
        code = 0 if self._fallback is not None else self._driver.batch(call, stream)
        if self._driver.is_invalid_value(code):
            self._fallback = f"a call with {len(call)} pieces was answered with CUDA error {code}"
            logger.warning("%s is not used any more: %s", self.name, self._fallback)
        elif code != 0:
            raise CopyError(f"{self.name} of {len(call)} pieces failed with CUDA error {code}")
        if self._fallback is not None:
            self._loop.run(call, stream)


def _stream_for(driver: Driver, name: str) -> int:
    """Return the current stream's handle, where copies may be queued on it."""
    stream = driver.stream()
    if stream in _LEGACY_STREAMS:
        raise CopyError(
            f"{name} was asked for on the default stream: copies need a stream of their own, see copy.ordering"
        )
    if driver.capturing():
        raise CopyError(
            f"{name} was asked for while a CUDA graph is captured: the copy would be missing from it"
        )
    return stream


def _is_pinned(copy: Copy) -> bool:
    if isinstance(copy, Transfer):
        return copy.source.pinned and copy.target.pinned
    assert isinstance(copy, Move)
    return all(end.device.type != "cpu" or end.is_pinned() for end in (copy.source, copy.target))
