"""Reproducible near-normal noise, the same bits on every machine.

``torch.randn`` rounds differently with and without vector instructions. Sums of integers are exact, so this
draws four 16-bit integers per value and adds them (Irwin-Hall: close to normal, cut off at 3.46 deviations).
"""

from __future__ import annotations

import hashlib
import math

import torch

_DRAWS = 4
_RANGE = 1 << 16
_MEAN = _DRAWS * (_RANGE - 1) / 2
_DEVIATION = math.sqrt(_DRAWS * (_RANGE**2 - 1) / 12)


def noise(name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
    """Return float32 noise of mean 0 and the given standard deviation.

    The values depend on `name` and `shape` only: adding a tensor to the model changes no other tensor.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    total = torch.randint(_RANGE, (_DRAWS, *shape), generator=generator, dtype=torch.int64).sum(0)
    return ((total.double() - _MEAN) * (deviation / _DEVIATION)).float()
