"""Which checkpoints a batch captures: over chunks, with few buffers, after a retraction, off the grid."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.adapter.attribution import Absences
from sglang_histate.adapter.counters import Counters, Drop
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.planner import CapturePlanner
from sglang_histate.adapter.prompt_places import PromptPlaces
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.policy.interval import DEFAULT_INTERVALS, IntervalPolicy, parse_interval
from sglang_histate.policy.structure import Marker, Part, Structure

from .engine import request, tokens
from .stores import open_store, wait_threads

LAYOUT = StateLayout((0,), (1, 2, 2), torch.float32, (3, 3), torch.float32)
CPU = torch.device("cpu")


@dataclass
class Traffic:
    """What a ranking would tell; `went_on` is where the text of a branch goes on to."""

    price: float = 50.0
    inside: float = 0.5
    went_on: int | None = None

    def pressure(self) -> float:
        return 1.0

    def end_share(self) -> float:
        return 0.5

    def checkpoint_price(self) -> float:
        return self.price

    def hits_inside(self, start: int, end: int) -> float:
        return self.inside

    def parted(self, node, position: int) -> int | None:
        return self.went_on


class Bench:
    """A planner and its store; `chunk` plays one prefill batch through both."""

    def __init__(
        self, interval: str = "fixed:256", *, buffers: int = 64, page: int = 64, slabs: int = 256
    ) -> None:
        self.page = page
        self.store = open_store(LAYOUT, buffers=buffers, slabs=slabs, threads=1)
        self.counters = Counters()
        self.traffic = Traffic()
        self.planner = CapturePlanner(
            interval=parse_interval(interval) if isinstance(interval, str) else interval,
            state_tokens=100.0,
            ranking=self.traffic,
            page_size=page,
            grid=page,
            layout=LAYOUT,
            store=self.store,
            egress=LayerEgress(CPU, LAYOUT.codec),
            counters=self.counters,
            absences=Absences(),
        )

    def plan(self, *reqs):
        return self.planner.plan_batch(list(reqs))

    def publish(self, capture) -> None:
        for row in () if capture is None else capture.rows:
            self.store.put(row.key, row.position, row.record)
        wait_threads(self.store)
        self.store.poll()

    def chunk(self, req, start: int, end: int) -> list[int]:
        req.prefix_len, req.extend_end = start, end
        capture = self.plan(req)
        positions = [] if capture is None else [row.position for row in capture.rows]
        self.publish(capture)
        return positions

    def close(self) -> None:
        assert self.store.records.free == self.store.records.total
        self.store.close()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def test_one_forward_of_3000_tokens_takes_eleven_interior_states_and_the_last_page(bench) -> None:
    req = request(tokens((1, 3000)))
    assert bench.chunk(req, 0, 3000) == [*range(256, 3000, 256), 2944]
    assert bench.counters.planned == 12 and bench.counters.intervals == {256: 1}


@pytest.mark.parametrize("chunk", [64, 192, 512, 2048, 8192])
def test_chunks_do_not_change_the_plan(bench, chunk) -> None:
    req = request(tokens((1, 3000)))
    positions = []
    for start in range(0, 3000, chunk):
        positions += bench.chunk(req, start, min(start + chunk, 3000))
    assert positions == [*range(256, 3000, 256), 2944]
    assert bench.counters.intervals == {256: 1}, "the interval is chosen once per request"


def test_rows_name_offset_key_and_position(bench) -> None:
    ids = tokens((1, 1000))
    first, second = request(tokens((2, 40))), request(ids, extra_key="tenant", cache_salt="s")
    first.prefix_len, first.extend_end = 0, 40
    second.prefix_len, second.extend_end = 320, 832
    state_of(second, 64).plan = ()
    capture = bench.plan(first, second)
    keys = PageKeys(64, "tenant", "s")
    assert [(row.batch_row, row.offset, row.position) for row in capture.rows] == [
        (1, 256, 576),
        (1, 512, 832),
    ]
    assert [row.key for row in capture.rows] == [keys.at(ids, 576), keys.at(ids, 832)]
    assert bench.chunk(second, 832, 1000) == [960]
    bench.publish(capture)


def test_a_stored_position_is_not_captured_again_but_touched(bench) -> None:
    ids = tokens((1, 1024))
    assert bench.chunk(request(ids), 0, 1024) == [256, 512, 768, 960, 1024]
    oldest = next(iter(bench.store._index)).key
    assert bench.chunk(request(tokens((1, 600), (2, 424))), 0, 1024) == [768, 960, 1024]
    assert bench.counters.already_stored == 2
    assert next(iter(bench.store._index)).key != oldest, "a position that is met again is used again"


def test_two_requests_of_one_batch_may_take_the_same_position(bench) -> None:
    reqs = [request(tokens((1, 300))) for _ in range(2)]
    for req in reqs:
        req.prefix_len, req.extend_end = 0, 300
    capture = bench.plan(*reqs)
    assert [(row.batch_row, row.position) for row in capture.rows] == [(0, 256), (1, 256)]
    bench.publish(capture)  # the second is already stored, its record comes back


@pytest.mark.parametrize(
    ("interval", "total", "expected"),
    [
        ("none", 1000, [960]),
        ("none", 63, []),
        ("none", 64, [64]),
        ("none", 128, [64, 128]),
        ("none", 65, [64]),
        ("fixed:256", 256, [192, 256]),  # the same prompt again is computed from token 255 at the latest
        ("fixed:256", 257, [256]),
        ("fixed:256", 319, [256]),
        ("fixed:256", 320, [256, 320]),
        ("fixed:4096", 3000, [2944]),
    ],
)
def test_the_end_of_the_prompt_is_always_taken(bench, interval, total, expected) -> None:
    other = Bench(interval)
    assert other.chunk(request(tokens((1, total))), 0, total) == expected
    other.close()


def test_a_branch_point_is_taken_too(bench) -> None:
    req = request(tokens((1, 1000)))
    for branch, expected in ((704, [256, 512, 704, 768, 960]), (200, [256, 512, 768, 960])):
        state = state_of(req, 64)
        state.branch, state.plan_next = branch, -1
        req.prefix_len, req.extend_end = 0, 1000
        capture = bench.plan(req)
        assert [row.position for row in capture.rows] == expected
        for row in capture.rows:
            bench.store.release_record(row.record)


def test_a_retracted_request_is_planned_anew_over_its_output(bench) -> None:
    req = request(tokens((1, 1000)))
    assert bench.chunk(req, 0, 512) == [256, 512]
    assert bench.chunk(req, 512, 1000) == [768, 960]
    req.full_untruncated_fill_ids.extend(tokens((5, 400)))
    assert bench.chunk(req, 512, 1400) == [1024, 1280, 1344]  # 768 is stored
    assert bench.counters.already_stored == 1
    assert bench.counters.intervals == {256: 2}


def test_a_start_off_the_grid_captures_nothing_and_says_so(bench) -> None:
    assert bench.chunk(request(tokens((1, 1000))), 100, 1000) == []
    assert bench.counters.dropped[Drop.MISALIGNED] == 1


def test_a_chunk_that_ends_off_the_grid_misaligns_the_next_one_only(bench) -> None:
    req = request(tokens((1, 1500)))
    assert bench.chunk(req, 0, 300) == [256]
    assert bench.chunk(req, 300, 704) == []  # 512 lies between two steps of this chunk
    assert bench.chunk(req, 704, 1500) == [768, 1024, 1280, 1472]
    assert bench.counters.dropped[Drop.MISALIGNED] == 1


def test_embeddings_instead_of_tokens_are_never_captured(bench) -> None:
    req = request(tokens((1, 1000)))
    req.positional_embed_overrides = object()
    assert bench.chunk(req, 0, 1000) == []
    req.positional_embed_overrides, req.input_embeds = None, [[0.0]]
    assert bench.chunk(req, 0, 1000) == []


def test_few_buffers_keep_the_end_first_and_spread_the_rest() -> None:
    bench = Bench("fixed:64", buffers=10)  # one is left to the reads
    req = request(tokens((1, 4096)))
    req.prefix_len, req.extend_end = 0, 4096
    capture = bench.plan(req)
    positions = [row.position for row in capture.rows]
    assert len(positions) == 9 and positions[-1] == 4096
    gaps = [b - a for a, b in zip([0, *positions], positions, strict=False)]
    assert max(gaps) <= 2 * 4096 / 9 and bench.store.records.free == 1
    assert bench.counters.dropped[Drop.NO_RECORD] == 64 - 9 and bench.counters.planned == 9
    assert bench.plan(req) is None, "nothing is left, and nothing waits"
    bench.publish(capture)
    bench.close()


def test_adaptive_intervals_come_from_the_policy() -> None:
    bench = Bench(IntervalPolicy(DEFAULT_INTERVALS))
    chosen = bench.planner._interval.choose(8000, 100.0)
    assert bench.chunk(request(tokens((1, 8000))), 0, 8000) == [*range(chosen, 8000, chosen), 7936, 8000]
    bench.close()


@pytest.mark.parametrize(
    ("price", "inside"), [(0.0, 0.5), (50.0, 0.5), (4000.0, 0.5), (50.0, 0.0), (float("inf"), 0.5)]
)
def test_scarce_intervals_weigh_one_hit_against_the_price_of_all(price: float, inside: float) -> None:
    bench = Bench("scarce")
    bench.traffic.price, bench.traffic.inside = price, inside
    chosen = bench.planner._interval.choose(8000, min(price / inside, 1e12) if inside else 1e12)
    inner = range(chosen, 8000, chosen) if chosen else ()
    assert bench.chunk(request(tokens((1, 8000))), 0, 8000) == sorted({*inner, 7936, 8000})
    assert bench.counters.intervals == {chosen: 1}
    bench.close()


def test_learned_positions_follow_where_requests_part() -> None:
    """Twenty prompts part 20 pages into one that went on: the next gets a checkpoint near there, and none where it costs more."""
    bench = Bench("learned", slabs=2048)
    bench.traffic.price = 40.0
    before = bench.chunk(request(tokens((1, 6400))), 0, 6400)
    bench.traffic.went_on = 6400
    for number in range(20):
        req = request(tokens((10 + number, 6400)))
        state_of(req, 64).kv_covered = 1280
        bench.chunk(req, 0, 6400)
    bench.traffic.went_on = None
    after = bench.chunk(request(tokens((99, 6400))), 0, 6400)
    assert min(abs(position - 1280) for position in after) <= 64
    assert min(abs(position - 1280) for position in before) > 64
    assert {6336, 6400} <= set(after), "the ends are kept at any price"
    bench.traffic.price = float("inf")
    assert bench.chunk(request(tokens((100, 6400))), 0, 6400) == [6336, 6400]
    bench.close()


USER, TOOL = 900, 901


def talk(*parts: tuple[int | None, int, int]) -> array:
    """Return tokens of (marker or None, seed, count of the tokens behind it)."""
    ids = array("q")
    for marker, seed, count in parts:
        if marker is not None:
            ids.append(marker)
        ids.extend(tokens((seed, count)))
    return ids


def talking(**more: Any) -> Bench:
    bench = Bench("learned", slabs=2048, **more)
    markers = [Marker((USER,), Part.USER), Marker((TOOL,), Part.TOOL_RESULT)]
    bench.planner.places = PromptPlaces(Structure(markers), bench.page)
    return bench


def test_ends_of_tools_and_last_user_messages_are_captured_before_anything_is_learned() -> None:
    bench = talking()
    bench.traffic.price = 4.0
    ids = talk((None, 1, 1000), (USER, 2, 700), (TOOL, 3, 700), (USER, 4, 900), (USER, 5, 600))
    taken = bench.chunk(request(ids), 0, len(ids))
    plain = Bench("learned", slabs=2048)
    plain.traffic.price = 4.0
    for start in (1000, 2402, 3303):  # where the first, the last but one and the last user message begin
        assert start // 64 * 64 in taken
    assert 960 not in plain.chunk(request(ids), 0, len(ids)), "else this shows nothing"
    bench.close()
    plain.close()


def test_a_kind_of_place_where_clients_cut_is_learned_from_few() -> None:
    """A client blanks a tool result that it sent long ago: after a few times, results in the middle are kept."""
    bench = talking()
    bench.traffic.price = 40.0

    def prompt(seed: int) -> array:
        return talk((None, seed, 400), (USER, seed + 1, 900), (TOOL, seed + 2, 900), (USER, seed + 3, 2000))

    place = (400 + 1 + 900) // 64 * 64
    assert place not in bench.chunk(request(prompt(1)), 0, 4203)
    for number in range(8):
        seed = 100 * (number + 1)
        old = prompt(seed)
        bench.chunk(request(old), 0, len(old))
        new = request(old[: place + 80] + tokens((seed + 9, 500)))
        state_of(new, 64).kv_covered = (
            place + 64
        )  # a page further than the place: the words that begin it are alike
        bench.traffic.went_on = 4160
        bench.chunk(new, 0, len(new.full_untruncated_fill_ids))
        bench.traffic.went_on = None
    assert place in bench.chunk(request(prompt(3000)), 0, 4203)
    expected = bench.planner.hits_expected()
    assert expected is not None and expected["places"]["tool result"] > 0.1
    bench.close()


@pytest.mark.parametrize("chunk", [64, 192, 2048])
def test_learned_positions_are_chosen_once_per_request(chunk: int) -> None:
    bench = Bench("learned")
    req, positions = request(tokens((1, 6400))), []
    for start in range(0, 6400, chunk):
        positions += bench.chunk(req, start, min(start + chunk, 6400))
    whole = Bench("learned")
    assert positions == whole.chunk(request(tokens((1, 6400))), 0, 6400)
    assert bench.planner.prior.as_json() == whole.planner.prior.as_json()
    bench.close()
    whole.close()


def test_a_page_of_128_names_only_multiples_of_128() -> None:
    bench = Bench("fixed:256", page=128)
    assert bench.chunk(request(tokens((1, 1000))), 0, 1000) == [256, 512, 768, 896]
    bench.close()


def test_flashinfer_with_a_large_page_and_a_chunk_start_between_two_pages() -> None:
    """SGLang leaves a chunk off the grid when rounding it down would leave nothing (`floor_chunked_tokens`)."""
    bench = Bench("fixed:256", page=128)
    req = request(tokens((1, 1000)))
    bench.chunk(req, 0, 64)
    req.prefix_len, req.extend_end = 64, 1000
    capture = bench.plan(req)
    try:
        if capture is not None:
            capture.prepare([req.extend_end - req.prefix_len], CPU, 128)
    finally:
        bench.store.close()


@st.composite
def traffic(draw):
    reqs = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 1500)), min_size=1, max_size=5))
    return reqs, draw(st.integers(1, 24)), draw(st.sampled_from([64, 128, 512, 1024])), draw(st.booleans())


@settings(max_examples=60)
@given(traffic())
def test_every_wanted_checkpoint_is_planned_or_counted(case) -> None:
    shapes, buffers, chunk, dense = case
    bench = Bench("fixed:64" if dense else "fixed:256", buffers=buffers)
    reqs = [request(tokens((seed, length))) for seed, length in shapes]
    for start in range(0, max(length for _, length in shapes), chunk):
        batch = [req for req in reqs if len(req.full_untruncated_fill_ids) > start]
        for req in batch:
            req.prefix_len = start
            req.extend_end = min(start + chunk, len(req.full_untruncated_fill_ids))
        before = (
            bench.counters.planned + bench.counters.dropped[Drop.NO_RECORD] + bench.counters.already_stored
        )
        capture = bench.plan(*batch)
        rows = [] if capture is None else capture.rows
        inside = [
            [p for p in state_of(req, 64).plan if req.prefix_len < p <= req.extend_end] for req in batch
        ]
        after = (
            bench.counters.planned + bench.counters.dropped[Drop.NO_RECORD] + bench.counters.already_stored
        )
        assert after - before == sum(map(len, inside))
        for row in rows:
            req = batch[row.batch_row]
            assert row.position in inside[row.batch_row] and row.offset == row.position - req.prefix_len
            assert bench.store.lookup(row.key) is None
        assert len({id(row.record) for row in rows}) == len(rows)
        assert bench.store.records.free >= max(min(1, buffers - 1), buffers // 8)
        bench.publish(capture)
    assert bench.counters.dropped[Drop.MISALIGNED] == 0
    bench.close()
