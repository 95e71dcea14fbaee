"""The host tier's memory: one arena of pages for KV and checkpoints, and how much there may be."""

from sglang_histate.pool.arena import HostArena, Kind, PageError
from sglang_histate.pool.limits import Headroom, available_memory, check_host_size

__all__ = [
    "Headroom",
    "HostArena",
    "Kind",
    "PageError",
    "available_memory",
    "check_host_size",
]
