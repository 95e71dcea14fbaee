"""A server whose SSD has wrong states under right sums: it finds out while idle, says so, and is right from then on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from eval.servers import Server

from .conftest import FOLDER, Servers, Spec
from .slabs import slab_files
from .tools import assert_all_returned, assert_same, cached, cold_run, details, difference, random_tokens

pytestmark = pytest.mark.server

COMMON = ("--chunked-prefill-size", "2048", "--max-total-tokens", "20480", "--histate-verify-rate", "1")
# What is written while this file exists is wrong.
SWITCH = "wrong-states"
VERIFY = Spec("verify", COMMON, (("HISTATE_TEST_WRONG_STATES", f"{FOLDER}/{SWITCH}"),))
PROMPT = random_tokens(8000, "verify")


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers.get(VERIFY)


def wait_for(
    server: Server, what: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not what(status := server.status()):
        assert time.monotonic() < deadline, (
            status["verification"] | status["counters"]["verify_skipped_total"]
        )
        time.sleep(0.2)
    return status


def quarantined(status: dict[str, Any]) -> bool:
    return bool(status["verification"]["quarantined"])


def restore(server: Server, cut: int, seed: str) -> dict[str, Any]:
    """Send PROMPT, then a rewrite of it, and return the answer to that; it resumes from the SSD."""
    server.generate(PROMPT, 1)
    server.settle()
    warm = server.generate(PROMPT[:cut] + random_tokens(100, seed), 8)
    assert details(warm)["ssd_checkpoint"] == cached(warm) == 5120
    return warm


def test_right_states_are_verified_and_requests_go_first(server: Server) -> None:
    restore(server, 5500, "verify right")
    wait_for(server, lambda status: status["verification"]["running"])
    # The check takes several chunks, and this request does not wait for all of them.
    assert cached(server.generate(random_tokens(100, "verify short"), 1)) == 0
    status = wait_for(server, lambda status: not status["verification"]["running"])
    assert status["verification"]["pending"] + status["counters"]["verified_total"] == 1
    status = wait_for(server, lambda status: status["counters"]["verified_total"])
    assert status["counters"]["verify_mismatches_total"] == 0 and not quarantined(status)
    assert set(status["counters"]["verify_skipped_total"].values()) == {0}
    # Only a real prompt can be asked for again.
    assert status["counters"]["checkpoints_captured_total"] == status["counters"]["checkpoints_planned_total"]
    assert_all_returned(server)


def test_wrong_states_end_the_use_of_the_ssd(server: Server, servers: Servers) -> None:
    (servers.folder / SWITCH).touch()
    before = server.settle()["counters"]
    wrong = restore(server, 5500, "verify new")
    rewrite = PROMPT[:5500] + random_tokens(100, "verify new")
    status = wait_for(server, quarantined)
    counters = status["counters"]
    assert (
        counters["verify_mismatches_total"] == 1
        and counters["verified_total"] == before["verified_total"] + 1
    )
    assert "the state of layer 0 is 2 away" in status["verification"]["quarantine_reason"]
    log = server.log_file.read_text(encoding="utf-8")
    assert log.count("HISTATE ALARM") == 1
    (slabs,) = slab_files(servers.ssd_dir(VERIFY))
    note = json.loads(slabs.with_name("quarantined.json").read_text(encoding="utf-8"))
    assert note["since"] == status["verification"]["quarantined_since"]

    # The wrong states are in the tree as well: it is empty by now, and the SSD is not asked.
    right = server.generate(rewrite, 8)
    assert cached(right) == 0
    assert difference(wrong, right) > 0.01, "the states were not wrong enough to notice"
    again = server.generate(PROMPT[:3000] + random_tokens(100, "verify other"), 8)
    assert details(again)["ssd_checkpoint"] == 0
    assert_same(right, cold_run(server, rewrite, 8))
    after = server.settle()
    assert after["tiers"]["ssd"]["entries"] == 0 and quarantined(after), "a flush does not lift it"
    assert after["counters"]["ssd_restored_requests_total"] == counters["ssd_restored_requests_total"]
    assert after["counters"]["ssd_written_bytes_total"] == counters["ssd_written_bytes_total"]
    assert after["counters"]["ssd_puts_total"]["quarantined"] > 0
    assert_all_returned(server)


def test_what_it_does_for_itself_is_seen_by_nobody(server: Server) -> None:
    log = server.log_file.read_text(encoding="utf-8")
    assert "state was deleted" not in log and "not found in rid_to_state" not in log
    assert not re.search(r"Traceback|leak", log)
