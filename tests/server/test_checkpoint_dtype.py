"""A server that keeps checkpoints in bf16: restores are read, counted, and as close to exact as the manual says."""

from __future__ import annotations

import pytest
import torch

from eval.checkpoint_dtype.answers import cases, computed, fill, restored
from eval.checkpoint_dtype.states import newest, relative_error
from eval.servers import Server

from .conftest import Servers, Spec
from .tools import (
    BF16_LOGPROB_BOUND,
    Checkpoints,
    assert_all_returned,
    cached,
    cold_run,
    details,
    difference,
    floor_page,
    random_tokens,
)

pytestmark = pytest.mark.server

BF16 = Spec(
    "bf16-checkpoints",
    ("--chunked-prefill-size", "8192", "--max-total-tokens", "20480", "--histate-interval", "fixed:512",
     "--histate-checkpoint-dtype", "bf16"),
)  # fmt: skip
DEPTH = 2048


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers.get(BF16)


def test_a_checkpoint_takes_half_the_bytes(server: Server, servers: Servers) -> None:
    status = server.status()
    assert status["config"]["checkpoint_dtype"] == "bf16"
    stored_bytes = status["checkpoint_stored_bytes"]
    # What one more costs the interval policy, and how many there is room for, follow the encoded bytes.
    assert status["checkpoint_in_kv_tokens"] == round(stored_bytes / status["kv_bytes_per_token"], 1)
    assert status["tiers"]["ssd"]["checkpoints"]["total"] > (64 << 20) / status["checkpoint_bytes"]
    checkpoints = Checkpoints(server, servers.ssd_dir(BF16))
    checkpoints.mark()
    server.generate(random_tokens(DEPTH + 10, "size"), 1)
    written = checkpoints.written()
    assert {len(stored.payload) for stored in written.values()} == {stored_bytes}
    # The demo model keeps 49,152 bytes of temporal states; the windows are not encoded.
    assert status["checkpoint_bytes"] - stored_bytes == 49_152 // 2


def test_a_restore_from_the_ssd_is_counted_and_within_its_bound(server: Server, servers: Servers) -> None:
    (case,) = cases(DEPTH, 1, seed=5)
    exact = computed(server, case, 16)
    fill(server, case)
    before = server.status()["counters"]
    warm = restored(server, case, exact.tokens)  # raises unless the checkpoint on the SSD was used
    after = server.settle()["counters"]
    assert after["ssd_restored_requests_total"] == before["ssd_restored_requests_total"] + 1
    assert after["ssd_restored_tokens_total"] == before["ssd_restored_tokens_total"] + DEPTH
    assert after["ssd_read_bytes_total"] > before["ssd_read_bytes_total"], "it was on the SSD alone"
    errors = [abs(a - b) for a, b in zip(warm.logprobs, exact.logprobs, strict=True)]
    assert 0 < max(errors) <= BF16_LOGPROB_BOUND


def test_the_state_that_grows_out_of_a_restored_one(server: Server, servers: Servers) -> None:
    (case,) = cases(DEPTH, 1, seed=6)
    rewrite = case.prefix + random_tokens(700, "grows")
    end = floor_page(len(rewrite))
    fill(server, case)
    stored = newest(servers.ssd_dir(BF16), DEPTH).states
    warm = server.generate(rewrite, 1)
    assert cached(warm) == details(warm)["ssd_checkpoint"] == DEPTH
    server.settle()
    resumed = newest(servers.ssd_dir(BF16), end).states
    cold_run(server, rewrite, 1)
    server.settle()
    assert torch.equal(newest(servers.ssd_dir(BF16), DEPTH).states, stored), "the same state, the same bytes"
    # Two roundings of the end (one in either run) and what is left of the one at the restore.
    assert relative_error(resumed, newest(servers.ssd_dir(BF16), end).states) <= 2 * 2.0**-8


def test_a_state_that_never_left_the_device_is_exact(server: Server) -> None:
    prompt = random_tokens(1000, "device")
    first = server.generate(prompt, 8)
    turn = prompt + first["output_ids"] + random_tokens(30, "turn")
    warm = server.generate(turn, 8)
    assert cached(warm) >= 960 and details(warm)["ssd_checkpoint"] == 0
    cold = cold_run(server, turn, 8)
    assert warm["output_ids"] == cold["output_ids"] and difference(warm, cold) <= 1e-4


def test_nothing_is_left_in_use(server: Server) -> None:
    assert_all_returned(server)
