"""Record buffers: what the memory behind them is like."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_histate.store.records import RecordPool

from .conftest import LAYOUT


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)
def test_buffers_ask_for_huge_pages_and_are_no_child_s() -> None:
    pool = RecordPool(LAYOUT, 2)
    address = pool.memory.ctypes.data
    inside, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, _ = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "hg" in flags and "dc" in flags
