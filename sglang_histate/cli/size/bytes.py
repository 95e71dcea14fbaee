"""What one rank's KV and checkpoints take, by the layout that the server itself uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_histate.cli.size.errors import SizeError
from sglang_histate.config import CheckpointDtype

if TYPE_CHECKING:
    from sglang_histate.cli.size.model import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Dtypes:
    """How numbers are kept: KV, the convolution window, the temporal state, and the latter in records."""

    kv: str
    window: str
    state: str
    encoding: CheckpointDtype


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank. `state_image_pages`: pages of the host arena that a checkpoint takes there."""

    ranks: int
    page_tokens: int
    kv_token_bytes: int
    checkpoint_bytes: int
    stored_bytes: int
    slab_bytes: int
    kv_pages_per_slab: int
    state_image_pages: int

    @property
    def page_bytes(self) -> int:
        return self.kv_token_bytes * self.page_tokens

    @property
    def checkpoint_tokens(self) -> float:
        """N_s: what a checkpoint costs on the SSD, in tokens of KV."""
        return self.stored_bytes / self.kv_token_bytes


def sizes_of(shape: ModelShape, dtypes: Dtypes, ranks: int, page_tokens: int) -> Sizes:
    """Return the sizes of one of `ranks` equal ranks.

    Raises:
        SizeError: the ranks cannot divide the heads, or the encoding is not one for these states.
    """
    import torch

    from sglang_histate.adapter.state_layout import StateLayout

    for name, heads in (
        ("attention heads", shape.attention_heads),
        ("linear key heads", shape.key_heads),
        ("linear value heads", shape.value_heads),
    ):
        if heads % ranks:
            raise SizeError(f"--tp {ranks} does not divide the {heads} {name} of this model: use a divisor")
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise SizeError(
            f"--tp {ranks} and the {shape.kv_heads} KV heads of this model do not divide each other"
        )
    if dtypes.encoding is not CheckpointDtype.NATIVE and dtypes.state != "float32":
        raise SizeError(
            f"--checkpoint-dtype {dtypes.encoding.value} encodes states in float32, this model keeps them in "
            f"{dtypes.state}: use native, or --mamba-ssm-dtype float32"
        )
    layout = StateLayout(
        shape.linear_layers,
        (shape.value_heads // ranks, shape.value_dim, shape.key_dim),
        getattr(torch, dtypes.state),
        (shape.channels // ranks, shape.window),
        getattr(torch, dtypes.window),
        dtypes.encoding,
    )
    kv_heads = max(1, shape.kv_heads // ranks)
    token = shape.full_layers * 2 * kv_heads * shape.head_dim * DTYPE_BYTES[dtypes.kv]
    record = layout.record_layout(token * page_tokens)
    return Sizes(
        ranks=ranks,
        page_tokens=page_tokens,
        kv_token_bytes=token,
        checkpoint_bytes=layout.checkpoint_bytes,
        stored_bytes=layout.stored_bytes,
        slab_bytes=record.slab_bytes,
        kv_pages_per_slab=record.pages_per_extent,
        state_image_pages=-(-layout.image_bytes // (token * page_tokens)),
    )
