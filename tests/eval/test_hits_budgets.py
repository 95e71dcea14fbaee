from __future__ import annotations

from typing import Any

import pytest

from eval.internal_hits.budgets import (
    Budgets,
    Holdings,
    Units,
    difference,
    hicache_ratio,
    histate_holdings,
    stock_holdings,
)
from eval.internal_hits.systems import (
    HICACHE,
    HISTATE,
    HISTATE_NONE,
    NO_CACHE,
    STOCK,
    Setup,
    command_line,
    shown,
)

STATUS: dict[str, Any] = {
    "config": {"ssd_size_bytes": 64 << 20},
    "kv_bytes_per_token": 512.0,
    "checkpoint_bytes": 62976,
    "tiers": {
        "device": {
            "one_pool": False,
            "kv": {"total_bytes": 32768 * 512},
            "states": {"total_bytes": 48 * 62976},
            "total_bytes": 32768 * 512 + 48 * 62976,
        },
        "host": {"arena_bytes": 65600 * 512 + 97 * 65536, "inflight": {"total_bytes": 240 * 69632}},
        "ssd": {"checkpoints": {"total": 963, "total_bytes": 963 * 69632}},
    },
}
LOG = """Allocating kv hierarchical KV host pool: 93952 tokens, 0.05 GB host memory.
Allocating 0.01 GB host memory for hierarchical Mamba cache (137 state slots, layout=page_first_direct)."""
UNITS = Units(512.0, 62976)


def setup(tmp_path: Any, **changes: Any) -> Setup:
    values: dict[str, Any] = {
        "model": None,
        "chunk": 8192,
        "budgets": Budgets(32768, 48, 2.0, 16 << 20, 64 << 20),
        "work_dir": tmp_path,
    }
    return Setup(**{**values, **changes})


def test_histate_holds_pools_and_records_in_flight() -> None:
    held, units = histate_holdings(STATUS)
    assert units == UNITS
    assert held.device == 32768 * 512 + 48 * 62976
    assert held.host == 65600 * 512 + 97 * 65536 + 240 * 69632
    assert held.disk == 64 << 20


def test_hicache_gets_the_in_flight_bytes_as_pools() -> None:
    held, _ = histate_holdings(STATUS)
    ratio = hicache_ratio(held)
    assert ratio * held.device == pytest.approx(held.host)
    # What SGLang makes of that ratio: whole pages plus one page, whole slots plus one slot.
    kv = (int(32768 * ratio) // 64 + 1) * 64 * 512
    states = (int(48 * ratio) + 1) * 62976
    assert kv + states == pytest.approx(held.host, rel=0.01)


def test_real_bytes_of_a_stock_server_and_the_difference() -> None:
    held = stock_holdings({"max_total_num_tokens": 32768}, LOG, UNITS, 48, 64 << 20)
    assert (held.host_kv, held.host_states, held.disk) == (93952 * 512, 137 * 62976, 64 << 20)
    reference, _ = histate_holdings(STATUS)
    assert difference(reference, held) is None
    smaller = stock_holdings({"max_total_num_tokens": 30000}, LOG, UNITS, 48, 64 << 20)
    assert "device" in str(difference(reference, smaller))
    no_tiers = stock_holdings({"max_total_num_tokens": 32768}, "", UNITS, 48, 0)
    assert difference(reference, no_tiers) is None


def test_holdings_as_text() -> None:
    assert Holdings(1 << 20, 0, 1 << 20, 0, 1 << 20, 1 << 30).text() == (
        "device 1.00MiB, host 2.00MiB (of it 1.00MiB in flight), disk 1.00GiB"
    )


def test_every_system_gets_the_same_device_pools_and_disk(tmp_path: Any) -> None:
    held, units = histate_holdings(STATUS)
    this = setup(tmp_path, reference=held, units=units)
    for name in (HISTATE, HISTATE_NONE, HICACHE, NO_CACHE):
        arguments, environ = command_line(name, this)
        text = " ".join(arguments)
        assert "--max-total-tokens 32768 --max-mamba-cache-size 48 --page-size 64" in text
        assert "--chunked-prefill-size 8192" in text
        assert ("--disable-histate" in arguments) == (name in (HICACHE, NO_CACHE))
        assert ("--disable-radix-cache" in arguments) == (name == NO_CACHE)
        assert ("--histate-interval none" in text) == (name == HISTATE_NONE)
        assert (str(64 << 20) in text) == (name != NO_CACHE)
        assert bool(environ) == (name == HICACHE)
    arguments, _ = command_line(HICACHE, this)
    assert f"{hicache_ratio(held):.4f}" in arguments
    assert "2.0000" in command_line(HICACHE, setup(tmp_path))[0]


def test_default_chunk_model_and_extra_flags(tmp_path: Any) -> None:
    this = setup(tmp_path, chunk=None, model="models/x", extra=("--tp-size", "2"))
    text = shown(HICACHE, this)
    assert "--chunked-prefill-size" not in text and "--demo" not in text
    assert "--model-path models/x" in text and text.endswith("--tp-size 2")
    assert text.startswith("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=")


def test_every_system_with_states_finds_the_end_of_an_answer_to_within_a_page(tmp_path) -> None:
    """HiState's launcher sets the flag unasked."""
    for name in (HICACHE, STOCK):
        arguments, _ = command_line(name, setup(tmp_path))
        assert arguments[arguments.index("--mamba-track-interval") + 1] == "64"
    assert "--mamba-track-interval" not in command_line(NO_CACHE, setup(tmp_path))[0]
