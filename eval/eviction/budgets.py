"""What every mode gets: bytes by tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budgets:
    """Device: tokens of KV and states, one pool of so many bytes or two fixed shares. Host: bytes for KV, states and
    states in flight. SSD: bytes.
    """

    device_kv_tokens: int
    device_states: int
    host_bytes: int
    inflight_bytes: int
    ssd_bytes: int
    one_device_pool: bool = True


@dataclass(frozen=True)
class Units:
    """Bytes of one rank. `checkpoint` is its state, `slab` what it takes on the SSD or in flight."""

    kv_token: int
    checkpoint: int
    slab: int


DEMO_UNITS = Units(kv_token=512, checkpoint=62_976, slab=69_632)
"""The demo model's, as ``/histate/status`` gives them: a checkpoint is as large as the KV of 123 tokens."""
