"""Step 8: the error of bf16 and int8 on synthetic states. For sanity only: what it does to answers needs a model."""

from __future__ import annotations

import torch

from sglang_histate.config import CheckpointDtype

from ..table import PoolTable
from .steps import Bench


def run(bench: Bench) -> None:
    device, layers = bench.device, min(2, bench.scale.layers)
    shape = (layers, 2, bench.scale.heads, 128, 128)
    key_channels = torch.exp(
        torch.linspace(-6, 2, 128, device=device.torch)
    )  # decay makes channels unlike each other
    states = {
        "normal": device.random(*shape),
        "channels of unlike size": device.random(*shape) * key_channels,
        "heavy tails": device.random(*shape) / device.random(*shape).abs().clamp_min(1e-3),
    }
    conv = device.random(layers, 2, *bench.scale.conv, dtype=torch.bfloat16)
    for name, temporal in states.items():
        pool = PoolTable(temporal, conv)
        for encoding in (CheckpointDtype.BF16, CheckpointDtype.INT8):
            size = pool.form(encoding).record_bytes
            records = torch.empty((1, size), dtype=torch.uint8, device=device.torch)
            flags = device.kernels.pack(pool, [0], records, encoding)
            device.kernels.unpack(records, [1], pool, None, encoding)
            device.synchronize()
            state, error = pool.temporal[:, 0], (pool.temporal[:, 1] - pool.temporal[:, 0]).abs()
            bound = state.abs() * 2.0**-8
            if encoding is CheckpointDtype.INT8:
                bound = state.abs().amax(dim=-2, keepdim=True) / 254
            bench.row(
                what="error",
                states=name,
                encoding=encoding.value,
                relative=float((error.norm() / state.norm()).item()),
                most_of_bound=float((error / bound.clamp_min(1e-30)).max().item()),
                ok=not flags.any().item() and bool((error <= bound * (1 + 2.0**-14)).all()),
            )
