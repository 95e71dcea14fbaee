"""The encodings of a temporal state in a record: native, bf16, int8. Torch on any device; the oracle of every kernel.

Owns what an encoding does to the numbers of one layer, into which *parts* it puts them, and how many bytes those take.
Does not know where a part lies in a record (`StateLayout`), nor convolution windows, which no encoding touches.

    native   one part, the state itself                               no error, not even for NaN payloads
    bf16     one part, each number rounded to nearest even            |error| <= 2^-8 |x|
    int8     q ``[HV, V, K]`` int8 and scale ``[HV, K]`` float32      |error| <= amax / 254, amax over V

The int8 scale is amax / 127 per head and key channel, as in SGLang's `Int8CheckpointStore`: the recurrence decays key
channels, so numbers that matter alike share a scale. A channel of zeros has scale 0 (upstream's is clamped at 1e-8 / 127,
which rounds channels below it more coarsely than the bound allows). Encoding what was decoded gives the same numbers
again, so a state that is stored, restored and stored once more loses nothing the second time.

A state is restored once and goes on in full precision: errors are those of one rounding per restore, they do not build
up inside the recurrence. What is not finite cannot be encoded with a bound and is never to be stored: see `finite`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from sglang_histate.config import CheckpointDtype

INT8_LARGEST = 127


class Part(NamedTuple):
    """Shape and dtype of one piece of an encoded state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TemporalCodec(ABC):
    """One encoding for states ``[HV, V, K]`` of one layer. Stateless: any thread, any stream.

    `parts` are in the order in which they lie in a record.
    """

    def __init__(self, encoding: CheckpointDtype, parts: tuple[Part, ...]) -> None:
        self.encoding = encoding
        self.parts = parts

    @property
    def size_bytes(self) -> int:
        """Bytes of one layer's encoded state, without padding."""
        return sum(part.size_bytes for part in self.parts)

    @abstractmethod
    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of `states` ``[n, HV, V, K]``, each ``[n, *part.shape]`` on the same device.

        On CUDA all is queued on the current stream. Native parts share memory with `states`.
        """

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the state that `parts` hold to `out` ``[HV, V, K]``, in the state's own dtype."""

    @abstractmethod
    def finite(self, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether every number that `parts` decode to is finite. False for any NaN or infinity encoded."""


class _OnePart(TemporalCodec):
    """The state as one tensor of the part's dtype."""

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        (state,) = parts
        out.copy_(state)

    def finite(self, parts: Sequence[torch.Tensor]) -> bool:
        (state,) = parts
        return all_finite(state)


class NativeCodec(_OnePart):
    """Bit for bit."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(CheckpointDtype.NATIVE, (Part(shape, dtype),))

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (states,)


class Bf16Codec(_OnePart):
    """Half the bytes. A number beyond the largest bf16 becomes infinite, which `finite` finds."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(CheckpointDtype.BF16, (Part(shape, torch.bfloat16),))

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (states.to(torch.bfloat16),)


class Int8Codec(TemporalCodec):
    """A quarter of the bytes, and a scale for V numbers. A NaN or infinity makes its channel's scale one, too."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        heads, _, channels = shape
        super().__init__(
            CheckpointDtype.INT8, (Part(shape, torch.int8), Part((heads, channels), torch.float32))
        )

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # By a tensor: torch on CUDA would multiply by the inverse of a number, and a record's bytes would depend on
        # who encodes it.
        scale = states.abs().amax(dim=-2) / states.new_full((), INT8_LARGEST)
        divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(-2)
        rounded = torch.round(states / divisor).clamp_(-INT8_LARGEST, INT8_LARGEST)
        return rounded.nan_to_num_(0.0).to(torch.int8), scale

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        quantized, scale = parts
        torch.mul(quantized, scale.unsqueeze(-2), out=out)

    def finite(self, parts: Sequence[torch.Tensor]) -> bool:
        _, scale = parts
        return all_finite(scale * INT8_LARGEST)


def codec_for(encoding: CheckpointDtype, shape: tuple[int, ...], dtype: torch.dtype) -> TemporalCodec:
    """Return the codec of `encoding` for states of `shape` ``[HV, V, K]`` and `dtype`.

    Raises:
        ValueError: states in another dtype than float32 have no encoding but native.
    """
    if encoding is CheckpointDtype.NATIVE:
        return NativeCodec(shape, dtype)
    if dtype is not torch.float32:
        raise ValueError(f"{encoding.value} encodes float32 states, not {dtype}")
    return Bf16Codec(shape) if encoding is CheckpointDtype.BF16 else Int8Codec(shape)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has neither NaN nor infinity. One pass and no copy: both propagate to the extremes."""
    least, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(largest))
