"""The same bytes for every system: what each may hold on device, host and disk.

HiState's host memory is one arena for KV and states + records in flight. HiCache has one pool for each kind, and both
grow with one ratio to the device pools; so it gets the ratio at which its pools take all of HiState's host bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sglang_histate.sizes import format_size


@dataclass(frozen=True)
class Budgets:
    """What is asked of every server. Sizes in bytes; `host_ratio` is HiState's host pools to its device pools."""

    device_kv_tokens: int
    device_states: int
    host_ratio: float
    inflight_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Holdings:
    """What one running server really has, in bytes."""

    device_kv: int
    device_states: int
    host_kv: int = 0
    host_states: int = 0
    host_inflight: int = 0
    disk: int = 0
    host_arena: int = 0  # KV and states in one

    @property
    def device(self) -> int:
        return self.device_kv + self.device_states

    @property
    def host(self) -> int:
        return self.host_arena + self.host_kv + self.host_states + self.host_inflight

    def text(self) -> str:
        parts = [f"device {format_size(self.device)}", f"host {format_size(self.host)}"]
        if self.host_inflight:
            parts[-1] += f" (of it {format_size(self.host_inflight)} in flight)"
        return ", ".join([*parts, f"disk {format_size(self.disk)}"])


@dataclass(frozen=True)
class Units:
    """Bytes per token of KV and per state slot."""

    kv_bytes_per_token: float
    checkpoint_bytes: int


def histate_holdings(status: dict[str, Any]) -> tuple[Holdings, Units]:
    """Read ``/histate/status``. The disk is what the SSD tier was given, its slabs and the rounding below one slab."""
    tiers = status["tiers"]
    device = tiers["device"]
    # In one pool each kind could have it all: the bytes are counted once, as KV.
    one_pool = device["one_pool"]
    holdings = Holdings(
        device_kv=device["total_bytes"] if one_pool else device["kv"]["total_bytes"],
        device_states=0 if one_pool else device["states"]["total_bytes"],
        host_arena=tiers["host"]["arena_bytes"],
        host_inflight=tiers["host"]["inflight"]["total_bytes"],
        disk=status["config"]["ssd_size_bytes"],
    )
    return holdings, Units(status["kv_bytes_per_token"], status["checkpoint_bytes"])


def hicache_ratio(histate: Holdings) -> float:
    """Return the ratio at which two pools that scale with it take as many host bytes as HiState's two parts."""
    return histate.host / histate.device


_KV_POOL = re.compile(r"kv hierarchical KV host pool: (\d+) tokens")
_STATE_POOL = re.compile(r"hierarchical Mamba cache \((\d+) state slots")


def stock_holdings(
    server_info: dict[str, Any], log: str, units: Units, device_states: int, disk_bytes: int
) -> Holdings:
    """Read a server without HiState: ``/server_info``, and for the host pools the lines it logged at start."""
    kv_pool, state_pool = _KV_POOL.search(log), _STATE_POOL.search(log)
    return Holdings(
        device_kv=round(server_info["max_total_num_tokens"] * units.kv_bytes_per_token),
        device_states=device_states * units.checkpoint_bytes,
        host_kv=round(int(kv_pool[1]) * units.kv_bytes_per_token) if kv_pool else 0,
        host_states=int(state_pool[1]) * units.checkpoint_bytes if state_pool else 0,
        disk=disk_bytes,
    )


def difference(reference: Holdings, other: Holdings) -> str | None:
    """Say in which tier `other` has other bytes than `reference`, by more than 1 %; None if in none.

    A tier that `other` does not have at all is not compared: that is what "no cache" means.
    """
    for tier in ("device", "host", "disk"):
        wanted, found = getattr(reference, tier), getattr(other, tier)
        if found and abs(found - wanted) > 0.01 * wanted:
            return f"{tier}: {format_size(found)} instead of {format_size(wanted)}"
    return None
