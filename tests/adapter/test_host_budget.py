"""How large the arena is, what is refused, and pinning that fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_histate.adapter import pinning
from sglang_histate.adapter.host_budget import HostBudget, Ranks, host_budget
from sglang_histate.adapter.pinning import PinnedMemory
from sglang_histate.adapter.refusal import Refusal
from sglang_histate.config import config_from_flags
from sglang_histate.pool import Headroom

from .engine import PAGE, Engine, build, publish

ONE = Ranks(1, 1)
PLENTY = Headroom(1 << 50, "available in this test")
PAGE_BYTES = 4096  # 64 tokens x 1 head x 8 x float32, K and V
STATE_PAGES = 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(kv_tokens=4096, state_slots=16, temporal=(8, 16, 12))


def budget(engine: Engine, ranks: Ranks = ONE, headroom: Headroom = PLENTY, **flags: Any) -> HostBudget:
    params = SimpleNamespace(
        token_to_kv_pool_allocator=engine.kv, req_to_token_pool=engine.cache.req_to_token_pool, page_size=PAGE
    )
    config = config_from_flags(
        {"histate_ssd_dir": "/s", "histate_ssd_size": "8MiB", "histate_inflight_size": "1MiB", **flags}
    )
    return host_budget(params, engine.layout, config, ranks, headroom)


def test_by_default_what_two_pools_would_have_taken(engine) -> None:
    found = budget(engine)
    assert found.page_bytes == PAGE_BYTES
    assert found.pages == (4096 * 2 // PAGE + 1) + (16 * 2 + 1) * STATE_PAGES
    assert found.record_buffers == MIB // found.record_bytes
    assert found.total_bytes == found.arena_bytes + found.inflight_bytes


def test_hicache_size_is_the_arena_of_each_rank(engine) -> None:
    settings = publish(hicache_size=1)
    try:
        assert budget(engine).pages == int(1e9) // PAGE_BYTES
        with pytest.raises(
            Refusal, match=r"^--hicache-size 1 takes 1\.86GiB of host memory here \(ranks: 2\)"
        ):
            budget(engine, Ranks(2, 2), Headroom(1 << 30, "available on this machine"))
    finally:
        settings.restore()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_total_of_all_ranks_is_never_exceeded(engine, ranks) -> None:
    found = budget(engine, Ranks(ranks, ranks), histate_host_size="100MiB")
    assert 0 <= 100 * MIB - ranks * found.total_bytes < ranks * (PAGE_BYTES + 1)


def test_records_that_can_never_be_used_are_not_taken_from_the_total(engine) -> None:
    small = budget(engine, histate_host_size="64MiB", histate_inflight_size="32MiB", histate_ssd_size="2MiB")
    assert small.inflight_bytes < 3 * MIB and small.arena_bytes > 60 * MIB


def test_too_small_for_a_page_and_a_checkpoint(engine) -> None:
    flags = {"histate_inflight_size": "1MiB", "histate_ssd_size": "8MiB"}
    inflight = budget(engine, **flags).inflight_bytes
    least = inflight + (1 + STATE_PAGES) * PAGE_BYTES
    assert budget(engine, **flags, histate_host_size=str(max(least, MIB + 1))).pages >= 1 + STATE_PAGES
    with pytest.raises(Refusal) as caught:
        budget(engine, Ranks(4, 4), **flags, histate_host_size="2MiB")
    text = str(caught.value)
    assert text.startswith("--histate-host-size 2.00MiB is too small: a rank needs") and "\n" not in text
    assert "--histate-inflight-size" in text and "give at least" in text and "(ranks: 4)" in text
    with pytest.raises(Refusal, match=r"--histate-inflight-size .* is too small"):
        budget(build(temporal=(64, 64, 32)), **flags)


def test_more_than_the_machine_has(engine) -> None:
    room = Headroom(100 * MIB, "left of the container's limit of 1.00GiB")
    assert budget(engine, Ranks(4, 2), room, histate_host_size="200MiB").pages
    for ranks in (Ranks(2, 2), Ranks(1, 1)):
        with pytest.raises(Refusal) as caught:
            budget(engine, ranks, room, histate_host_size="202MiB")
        text = str(caught.value)
        assert text.startswith("--histate-host-size 202.00MiB takes") and "\n" not in text
        assert "100.00MiB are left of the container's limit of 1.00GiB: give less" in text
    with pytest.raises(Refusal, match=r"^--hicache-ratio 2 takes"):
        budget(engine, headroom=Headroom(1024, "available on this machine"))


@pytest.mark.parametrize(
    ("arguments", "total", "here"),
    [
        ({}, 1, 1),
        ({"tp_size": 4}, 4, 4),
        ({"tp_size": 4, "dp_size": 2}, 8, 8),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4, 4),
        ({"tp_size": 16, "nnodes": 2}, 16, 8),
    ],
)
def test_ranks(arguments, total, here) -> None:
    names = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "nnodes": 1}
    assert Ranks.of(SimpleNamespace(**{**names, **arguments})) == Ranks(total, here)


class Driver:
    """CUDA's runtime as far as pinning needs it. The call number `fails` is refused."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.calls = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fails:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


CUDA = torch.device("cuda")


def test_pinned_in_chunks_of_whole_pages(monkeypatch, caplog) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1000)
    memory, driver = np.zeros(3000, dtype=np.uint8), Driver()
    pin = PinnedMemory(memory, CUDA, flag="--histate-host-size", piece_bytes=300, runtime=driver)
    assert pin.pinned and sorted(driver.registered.values()) == [300, 900, 900, 900] and not caplog.records
    pin.release()
    pin.release()
    assert not driver.registered and not pin.pinned


@pytest.mark.parametrize("fails", [1, 3])
def test_pinning_that_fails_is_one_warning_and_pageable_memory(monkeypatch, caplog, fails) -> None:
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(
        torch, "zeros", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("pending"))
    )
    memory, driver = np.zeros(3000, dtype=np.uint8), Driver(fails)
    with caplog.at_level(logging.WARNING):
        pin = PinnedMemory(memory, CUDA, flag="--histate-host-size", piece_bytes=300, runtime=driver)
    assert not pin.pinned and not driver.registered and driver.calls == fails
    (record,) = caplog.records
    assert "--histate-host-size" in record.getMessage() and "pageable" in record.getMessage()


def test_without_a_gpu_nothing_is_pinned(caplog) -> None:
    pin = PinnedMemory(np.zeros(10, dtype=np.uint8), torch.device("cpu"), flag="--x", runtime=Driver(1))
    assert not pin.pinned and not caplog.records
