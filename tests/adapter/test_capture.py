"""Which rows of which tensor a capture takes, against a naive simulation in which every state is a unique number."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_histate.adapter import hooks
from sglang_histate.adapter.capture import CaptureRow, ForwardCapture
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.store.records import RecordPool

CPU = torch.device("cpu")
LAYERS = (0, 1, 3)
WINDOW = 3
LAYOUT = StateLayout(LAYERS, (2, 3, 4), torch.float32, (5, WINDOW), torch.float32)
GARBAGE = -7.0
STEP = 64


def state(layer: int, row: int, offset: int) -> float:
    """The state of one batch row after `offset` tokens of its extend. Exact in float32."""
    return layer * 1_000_000 + row * 20_000 + offset


def token(layer: int, row: int, offset: int) -> float:
    """The raw input number `offset` of one batch row."""
    return 0.5 + state(layer, row, offset)


class Forward:
    """What the layers of one forward pass hand to the hooks for a batch of extends of `lengths` tokens."""

    def __init__(self, lengths: list[int], every: int | None, seed: int = 0, padding: int = 0) -> None:
        self.lengths = lengths
        self.every = every
        self.padding = padding
        draw = random.Random(seed)
        self.slots = torch.tensor(draw.sample(range(1, len(lengths) + 9), len(lengths)), dtype=torch.int32)
        self.metadata = SimpleNamespace(
            state_checkpoint_every_n_tokens=None, state_checkpoint_cu_starts=None, num_state_checkpoints=0
        )
        self.backend = SimpleNamespace(
            kernel_dispatcher=SimpleNamespace(extend_uses_state_checkpoints=every is not None),
            forward_metadata=self.metadata,
        )

    def inputs(self, layer: int) -> torch.Tensor:
        rows = [token(layer, row, i) for row, n in enumerate(self.lengths) for i in range(n)]
        flat = torch.tensor(rows + [GARBAGE] * self.padding, dtype=torch.float32)
        return flat[:, None] + torch.arange(LAYOUT.conv_shape[0]) * 0.001

    def chunk_states(self, layer: int) -> torch.Tensor:
        """Per-chunk h (the state before each 64-token chunk) or periodic checkpoints (after every n tokens)."""
        if self.every is None:
            values = [state(layer, row, i) for row, n in enumerate(self.lengths) for i in range(0, n, STEP)]
        else:
            values = [
                state(layer, row, (i + 1) * self.every)
                for row, n in enumerate(self.lengths)
                for i in range(n // self.every)
            ]
        h = torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(-1, *LAYOUT.temporal_shape)
        return h.clone() if self.every is not None else h.clone()[None]

    def pool(self, layer: int) -> torch.Tensor:
        pool = torch.full((len(self.lengths) + 10, *LAYOUT.temporal_shape), GARBAGE)
        for row, n in enumerate(self.lengths):
            pool[self.slots[row]] = state(layer, row, n)
        return pool

    def batch(self, capture: ForwardCapture | None) -> Any:
        return SimpleNamespace(histate_capture=capture, extend_seq_lens_cpu=self.lengths)

    def run(self, capture: ForwardCapture) -> None:
        batch = self.batch(capture)
        for layer in LAYERS:
            found = SimpleNamespace(layer_id=layer)
            hooks.capture_inputs(self.backend, found, batch, self.inputs(layer))
            hooks.capture_states(found, batch, self.chunk_states(layer), self.pool(layer), self.slots)
        hooks.finish_capture(batch)


def capture_of(places: list[tuple[int, int]], layout: StateLayout = LAYOUT) -> ForwardCapture:
    """Return a capture of (batch row, offset) pairs, with records full of garbage."""
    pool = RecordPool(layout.record_layout(), max(1, len(places)))
    pool.memory[:] = 0xA5
    rows = []
    for row, offset in places:
        record = pool.acquire()
        assert record is not None
        rows.append(CaptureRow(row, offset, 1000 + offset, bytes(32), record))
    return ForwardCapture(rows, layout, LayerEgress(CPU, layout.codec))


def expect(capture: ForwardCapture) -> None:
    for row in capture.rows:
        for index, views in enumerate(LAYOUT.views(row.record.payload)):
            layer = LAYERS[index]
            assert (views.temporal == state(layer, row.batch_row, row.offset)).all(), (
                row.offset,
                views.temporal,
            )
            for column in range(WINDOW):
                expected = token(layer, row.batch_row, row.offset - WINDOW + column)
                assert torch.equal(
                    views.conv[:, column], expected + torch.arange(LAYOUT.conv_shape[0]) * 0.001
                )


@pytest.fixture(autouse=True)
def chunk_of_64(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: STEP)


@pytest.mark.parametrize("every", [None, 64])
@pytest.mark.parametrize(
    ("lengths", "places"),
    [
        ([64], [(0, 64)]),
        ([65], [(0, 64)]),
        ([3000], [(0, p) for p in range(256, 3000, 256)]),
        ([128, 1, 1], [(0, 64), (0, 128)]),
        ([100, 200, 64, 1], [(0, 64), (1, 64), (1, 192), (2, 64)]),
        ([1, 63, 130, 127, 1, 1], [(2, 64), (2, 128), (3, 64)]),
    ],
)
def test_examples(lengths, places, every) -> None:
    forward = Forward(lengths, every)
    capture = capture_of(places)
    forward.run(capture)
    expect(capture)
    assert capture.finished and capture.done()


@st.composite
def batches(draw) -> tuple[list[int], list[tuple[int, int]], int | None, int]:
    every = draw(st.sampled_from([None, 64, 128, 192]))
    lengths = draw(st.lists(st.integers(1, 700), min_size=1, max_size=6))
    lengths += [1] * draw(st.integers(0, 4))  # decode rows of a mixed batch
    step = every or STEP
    possible = [(row, p) for row, n in enumerate(lengths) for p in range(step, n + 1, step)]
    if not possible:
        lengths.insert(0, step)
        possible = [(0, step)]
    places = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=12, unique=True))
    return lengths, places, every, draw(st.integers(0, 5))


@given(batches())
def test_every_source_against_the_simulation(batch) -> None:
    lengths, places, every, seed = batch
    forward = Forward(lengths, every, seed, padding=seed * 7)
    capture = capture_of(places)
    if every is not None:
        forward.metadata.state_checkpoint_every_n_tokens = every  # stock tracking built its plan first
    forward.run(capture)
    expect(capture)


def test_h_and_inputs_of_a_narrower_type_are_widened() -> None:
    forward = Forward([256], None)
    capture = capture_of([(0, 64), (0, 256)])
    capture.prepare(forward.lengths, CPU, None)
    for layer in LAYERS:
        capture.capture_inputs(layer, torch.full((256, LAYOUT.conv_shape[0]), 1.5, dtype=torch.bfloat16))
        h = torch.full((1, 4, *LAYOUT.temporal_shape), 2.5, dtype=torch.bfloat16)
        capture.capture_states(layer, h, torch.full((20, *LAYOUT.temporal_shape), 3.5), forward.slots)
    capture.finish()
    for row, expected in zip(capture.rows, (2.5, 3.5), strict=True):
        for views in LAYOUT.views(row.record.payload):
            assert (views.temporal == expected).all() and (views.conv == 1.5).all()


def test_only_the_end_needs_no_intermediate_states() -> None:
    forward = Forward([128], None)
    capture = capture_of([(0, 128)])
    batch = forward.batch(capture)
    for layer in LAYERS:
        hooks.capture_inputs(forward.backend, SimpleNamespace(layer_id=layer), batch, forward.inputs(layer))
        hooks.capture_states(SimpleNamespace(layer_id=layer), batch, None, forward.pool(layer), forward.slots)
    hooks.finish_capture(batch)
    expect(capture)


def test_a_kernel_without_intermediate_states_is_an_error_that_names_the_layer() -> None:
    forward = Forward([128], None)
    capture = capture_of([(0, 64)])
    capture.prepare(forward.lengths, CPU, None)
    with pytest.raises(RuntimeError, match="layer 1: the linear-attention kernel returned no intermediate"):
        capture.capture_states(1, None, forward.pool(1), forward.slots)


@pytest.mark.parametrize(
    "place", [(0, 0), (0, 63), (0, 65), (0, 192)], ids=["start", "before", "after", "past the end"]
)
def test_an_offset_that_no_kernel_has_is_refused(place) -> None:
    with pytest.raises(AssertionError):
        capture_of([place]).prepare([130], CPU, None)


def test_planned_equals_captured() -> None:
    forward = Forward([128], None)

    def run(capture: ForwardCapture, inputs: tuple[int, ...], states: tuple[int, ...]) -> None:
        capture.prepare(forward.lengths, CPU, None)
        for layer in inputs:
            capture.capture_inputs(layer, forward.inputs(layer))
        for layer in states:
            capture.capture_states(layer, forward.chunk_states(layer), forward.pool(layer), forward.slots)
        capture.finish()

    for inputs, states in ((LAYERS[:2], LAYERS), (LAYERS, LAYERS[1:])):
        capture = capture_of([(0, 64)])
        with pytest.raises(AssertionError, match="planned 1 checkpoints over 3 layers, captured"):
            run(capture, inputs, states)
        assert not capture.finished and not capture.done()
    for inputs, states in (((0, 0), ()), (LAYERS, (1, 1))):
        with pytest.raises(AssertionError):
            run(capture_of([(0, 64)]), inputs, states)


def test_a_plan_that_never_reached_the_layers_stops_the_server() -> None:
    capture = capture_of([(0, 64)])
    rebuilt = SimpleNamespace(histate_capture=None)  # what a runner that drops the field would pass on
    for layer in LAYERS:
        hooks.capture_inputs(None, SimpleNamespace(layer_id=layer), rebuilt, torch.zeros(64, 5))
        hooks.capture_states(SimpleNamespace(layer_id=layer), rebuilt, None, torch.zeros(1), torch.zeros(1))
    with pytest.raises(AssertionError, match="captured 0 convolution windows and 0 states"):
        hooks.finish_capture(SimpleNamespace(histate_capture=capture))


def test_one_capture_serves_one_forward() -> None:
    forward = Forward([64], None)
    capture = capture_of([(0, 64)])
    forward.run(capture)
    with pytest.raises(AssertionError, match="two forward passes"):
        capture.finish()


def test_flashinfer_plan_is_built_where_stock_tracking_asked_for_none() -> None:
    forward = Forward([200, 63, 64, 1, 130], 64)
    assert hooks._flashinfer_plan(forward.metadata, forward.lengths, CPU) == 64
    assert forward.metadata.state_checkpoint_cu_starts.tolist() == [0, 3, 3, 4, 4, 6]
    assert forward.metadata.state_checkpoint_cu_starts.dtype == torch.int64
    assert forward.metadata.num_state_checkpoints == 6
    assert forward.metadata.state_checkpoint_every_n_tokens == 64


def test_flashinfer_plan_of_stock_tracking_is_kept() -> None:
    forward = Forward([200], 64)
    kept = torch.tensor([0, 1])
    forward.metadata.state_checkpoint_every_n_tokens = 128
    forward.metadata.state_checkpoint_cu_starts = kept
    assert hooks._flashinfer_plan(forward.metadata, forward.lengths, CPU) == 128
    assert forward.metadata.state_checkpoint_cu_starts is kept


def test_triton_batches_get_no_flashinfer_plan() -> None:
    forward = Forward([128], None)
    capture = capture_of([(0, 64)])
    hooks.prepare_sources(forward.backend, forward.batch(capture), CPU)
    assert capture.prepared and forward.metadata.state_checkpoint_every_n_tokens is None


@pytest.mark.parametrize(
    ("mode", "pending"),
    [
        (ForwardMode.EXTEND, True),
        (ForwardMode.MIXED, True),
        (ForwardMode.DECODE, False),
        (ForwardMode.IDLE, False),
    ],
)
def test_pending_capture(mode, pending) -> None:
    capture = capture_of([(0, 64)])
    batch = SimpleNamespace(histate_capture=capture, forward_mode=mode)
    assert hooks.pending_capture(batch) is (capture if pending else None)
    batch.histate_capture = None
    assert hooks.pending_capture(batch) is None


def test_a_batch_that_prefilled_before_has_nothing_pending() -> None:
    """A batch object lives on: it decodes, and may be extended again before it is planned again."""
    forward = Forward([64], None)
    capture = capture_of([(0, 64)])
    forward.run(capture)
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        assert hooks.pending_capture(SimpleNamespace(histate_capture=capture, forward_mode=mode)) is None


def test_hooks_do_nothing_with_another_cache() -> None:
    batch = SimpleNamespace(tree_cache=object(), reqs=[])
    assert hooks.plan_capture(batch) is None
    hooks.request_arrived(object(), None)
    assert hooks.request_ready(object(), None) is True
    details = {"device": 3, "host": 0}
    assert hooks.add_cached_details(SimpleNamespace(), details) is details
    assert hooks.add_cached_details(SimpleNamespace(histate=None), None) is None
    hooks.finish_capture(SimpleNamespace(histate_capture=None))
