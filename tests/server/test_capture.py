"""One prefill captures states at several positions inside the prompt, bit-equal to those of short prefills."""

from __future__ import annotations

import pytest

from eval.servers import Server

from .conftest import Servers, Spec
from .slabs import Stored, prefix_keys
from .tools import Checkpoints, Pending, assert_all_returned, cached, random_tokens, warm_equals_cold

pytestmark = pytest.mark.server

FIXED = ("--histate-interval", "fixed:256", "--max-total-tokens", "32768")
ONE_CHUNK = Spec("one-chunk", (*FIXED, "--chunked-prefill-size", "8192"))
SHORT_CHUNKS = Spec("short-chunks", (*FIXED, "--chunked-prefill-size", "256", "--disable-overlap-schedule"))
MIXED = Spec("mixed", (*FIXED, "--chunked-prefill-size", "512", "--enable-mixed-chunk"))

PROMPT = random_tokens(3000, "capture")
INTERIOR = [256 * step for step in range(1, 12)]
FINAL = 2944
BATCH = {length: random_tokens(length, f"batch-{length}") for length in (300, 700, 1024, 1029, 1500)}

Captured = dict[bytes, Stored]


def capture_one(servers: Servers, spec: Spec) -> tuple[Captured, list[int]]:
    server = servers.get(spec)
    checkpoints = Checkpoints(server, servers.ssd_dir(spec))
    checkpoints.mark()
    before = server.status()["counters"]
    engine = server.status()["copy_engine"]
    assert (engine["name"], engine["fallback"], engine["rejected"]) == ("cpu", None, {})
    assert engine["pack"] == {
        "name": "none",
        "reason": "states are encoded by a thread where they are on cpu",
    }
    answer = server.generate(PROMPT, 8)
    assert cached(answer) == 0
    written = checkpoints.written()
    counters = server.settle()["counters"]
    taken = counters["checkpoints_captured_total"] - before["checkpoints_captured_total"]
    assert (
        taken
        == counters["checkpoints_planned_total"] - before["checkpoints_planned_total"]
        == len(INTERIOR) + 1
    )
    assert counters["checkpoints_dropped_total"] == before["checkpoints_dropped_total"]
    return written, answer["output_ids"]


def capture_batch(servers: Servers, spec: Spec) -> Captured:
    server = servers.get(spec)
    checkpoints = Checkpoints(server, servers.ssd_dir(spec))
    checkpoints.mark()
    pending = [Pending(server, prompt, 4) for prompt in BATCH.values()]
    for request in pending:
        request.result()
    return checkpoints.written()


def capture_beside_decode(servers: Servers, spec: Spec) -> Captured:
    """Prefill while another request decodes, which `--enable-mixed-chunk` puts into one forward pass.

    Only the prefill's checkpoints are returned: a decode rounds by the size of its batch, hence by chance.
    """
    server = servers.get(spec)
    checkpoints = Checkpoints(server, servers.ssd_dir(spec))
    checkpoints.mark()
    decoding = Pending(server, random_tokens(130, "decoding"), 400)
    assert decoding.first_token.wait(120)
    prompt = random_tokens(2000, "beside")
    server.generate(prompt, 2)
    still_decoding = decoding.is_alive()
    decoding.result()
    assert still_decoding, "the decode ended before the prefill: nothing was mixed"
    wanted = set(prefix_keys(prompt).values())
    return {key: stored for key, stored in checkpoints.written().items() if key in wanted}


@pytest.fixture(scope="module")
def reference(servers: Servers) -> tuple[Captured, list[int], Captured, Captured]:
    """What a server captures that prefills in chunks of one interval, without overlap."""
    single, output = capture_one(servers, SHORT_CHUNKS)
    batch = capture_batch(servers, SHORT_CHUNKS)
    beside = capture_beside_decode(servers, SHORT_CHUNKS)
    assert_all_returned(servers.get(SHORT_CHUNKS))
    return single, output, batch, beside


@pytest.mark.parametrize("spec", [ONE_CHUNK, MIXED], ids=lambda spec: spec.name)
class TestAgainstShortChunks:
    def test_one_prefill_has_all_interior_states_and_the_final_one(
        self, servers: Servers, spec: Spec, reference: tuple[Captured, list[int], Captured, Captured]
    ) -> None:
        written, output = capture_one(servers, spec)
        assert sorted(stored.at_token for stored in written.values()) == [*INTERIOR, FINAL]
        assert output == reference[1]
        assert_equal(written, reference[0])
        assert len({stored.payload for stored in written.values()}) == len(INTERIOR) + 1

    def test_several_requests_in_one_batch(
        self, servers: Servers, spec: Spec, reference: tuple[Captured, list[int], Captured, Captured]
    ) -> None:
        written = capture_batch(servers, spec)
        expected = sorted(
            position
            for length in BATCH
            for position in {*range(256, length, 256), length // 64 * 64, (length - 1) // 64 * 64}
        )
        assert sorted(stored.at_token for stored in written.values()) == expected
        assert_equal(written, reference[2])

    def test_prefill_beside_a_decode(
        self, servers: Servers, spec: Spec, reference: tuple[Captured, list[int], Captured, Captured]
    ) -> None:
        written = capture_beside_decode(servers, spec)
        assert_equal(written, reference[3])
        assert {*(256 * step for step in range(1, 8)), 1984} == {
            stored.at_token for stored in written.values()
        }

    def test_what_a_mixed_batch_left_in_the_tree_is_right(
        self, servers: Servers, spec: Spec, reference: tuple[Captured, list[int], Captured, Captured]
    ) -> None:
        """A chunk beside decodes may begin off the page grid: a state from there must not be named by a page."""
        server = servers.get(spec)
        for length, prompt in BATCH.items():
            server.flush()
            for request in [Pending(server, other, 4) for other in BATCH.values()]:
                request.result()
            longer = [*prompt, 65, 66]
            warm = server.generate(longer, 8)
            assert cached(warm) > 0 or length < 400
            warm_equals_cold(server, longer, warm)

    def test_nothing_is_left_in_use(
        self, servers: Servers, spec: Spec, reference: tuple[Captured, list[int], Captured, Captured]
    ) -> None:
        server: Server = servers.get(spec)
        assert_all_returned(server)


def assert_equal(written: Captured, expected: Captured) -> None:
    assert written.keys() == expected.keys()
    for key, stored in written.items():
        assert stored.at_token == expected[key].at_token
        assert stored.payload == expected[key].payload, f"the states at {stored.at_token} differ"
