"""``python -m eval.checkpoint_dtype.speed``: how long one checkpoint of Qwen3.5-9B takes to encode, check and decode here.

On one CPU thread, as a reader thread decodes beside a busy server; with a GPU states are encoded there. Milliseconds, the
median of several runs, after one that is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from eval.aligned import aligned
from eval.arguments import positive, with_examples
from eval.progress import each
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype


def measure(encoding: CheckpointDtype, layers: int, runs: int) -> dict[str, float]:
    """Return milliseconds by step for a checkpoint of `layers` layers."""
    layout = StateLayout(
        tuple(range(layers)), (32, 128, 128), torch.float32, (8192, 3), torch.bfloat16, encoding
    )
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(layers, 1, *layout.temporal_shape, generator=generator)
    record = np.zeros(layout.record_layout().payload_bytes, dtype=np.uint8)
    image = np.zeros(layout.image_bytes, dtype=np.uint8)
    encoded, decoded = layout.record_views(record), layout.views(image)

    def encode() -> None:
        for state, views in zip(states, encoded, strict=True):
            for place, part in zip(views.temporal, layout.codec.encode(state), strict=True):
                place.copy_(part[0])

    def decode() -> None:
        for views, out in zip(encoded, decoded, strict=True):
            layout.codec.decode(views.temporal, out.temporal)
            out.conv.copy_(views.conv)

    return {
        "MiB": len(record) / (1 << 20),
        "encode": _median_ms(encode, runs),
        "check": _median_ms(lambda: layout.storable(record), runs),
        "decode": _median_ms(decode, runs),
    }


def _median_ms(step: Callable[[], object], runs: int) -> float:
    step()
    times = []
    for _ in range(runs):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return 1000 * statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.checkpoint_dtype.speed", description=__doc__.partition("\n\n")[2]
    )
    with_examples(parser, "python -m eval.checkpoint_dtype.speed --layers 24")
    parser.add_argument("--layers", type=positive, default=24, help="linear layers (%(default)s)")
    parser.add_argument("--runs", type=positive, default=9, help="of each step (%(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = {
        encoding.value: measure(encoding, given.layers, given.runs)
        for encoding in each(CheckpointDtype, "measure", "encoding")
    }
    names = list(next(iter(rows.values())))
    print(
        aligned(
            [["encoding", *names], *([name, *(f"{row[n]:.1f}" for n in names)] for name, row in rows.items())]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
