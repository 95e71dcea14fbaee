"""Multi-position capture: which recurrent states one forward pass must hand out, and their way into records.

Life: the planner builds a `ForwardCapture` with the batch (scheduler thread) -> the patched linear-attention backend
calls `capture_inputs` and `capture_states` once per linear layer (forward stream) -> the patched model runner calls
`finish`, which asserts planned == captured -> the cache polls `done` and publishes the records.

A state at offset o from the extend start is available from three sources:
- Triton and the CPU op return h ``[1, NT, HV, V, K]``, the state before each 64-token chunk: row ``chunk0 + o / 64``;
- FlashInfer returns states after every n tokens ``[N, HV, V, K]``: row ``first + o / n - 1``;
- at the end of the extend the pool's own slot holds it, whatever the kernel.
The convolution window at p is the last W-1 raw inputs before p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.request_state import RequestState
from sglang_histate.adapter.state_layout import RecordViews, StateLayout
from sglang_histate.copy.ordering import Mark, Rule
from sglang_histate.policy.history_tier import TierReason
from sglang_histate.policy.interval import STEP_TOKENS
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.store import NO_NAMESPACE, Record


@dataclass(frozen=True)
class CaptureRow:
    """One checkpoint to take: row of the batch, tokens from its extend start, absolute position, and where it goes."""

    batch_row: int
    offset: int
    position: int
    key: bytes
    record: Record
    state: RequestState | None = None  # of the request that computes it
    tier: Tier = Tier.SSD
    reason: TierReason = TierReason.FLAG

    @property
    def namespace(self) -> bytes:
        return NO_NAMESPACE if self.state is None else self.state.keys.namespace

    @property
    def useless(self) -> bool:
        """Whether the request was aborted before the KV that the checkpoint restores was in the tree."""
        return self.state is not None and self.state.released and self.position > self.state.placed


@dataclass(frozen=True)
class _Sources:
    """Index tensors on the device, built once per forward pass and shared by all layers."""

    conv_rows: torch.Tensor  # [n, W-1] rows of the raw input
    chunk_rows: torch.Tensor  # [m] rows of h
    chunk_numbers: list[int]  # the same on the host
    chunk_targets: list[int]  # which capture row each of them is
    end_rows: torch.Tensor  # [n - m] rows of the batch whose pool slot holds the state
    end_targets: list[int]


class ForwardCapture:
    """The checkpoints to take during one forward pass. Single use."""

    def __init__(self, rows: list[CaptureRow], layout: StateLayout, egress: LayerEgress) -> None:
        self.rows = rows
        self._layout = layout
        self._egress = egress
        self._views: list[list[RecordViews]] = [layout.record_views(row.record.payload) for row in rows]
        self._layer_index = {layer_id: index for index, layer_id in enumerate(layout.layer_ids)}
        self._inputs_taken: set[int] = set()
        self._states_taken: set[int] = set()
        self._sources: _Sources | None = None
        self._mark: Mark | None = None
        self.finished = False

    def prepare(self, extend_lens: list[int], device: torch.device, checkpoint_every: int | None) -> None:
        """Build the index tensors. `checkpoint_every` is FlashInfer's n in tokens, None for per-chunk h."""
        window = self._layout.conv_shape[-1]
        token_starts, chunk_starts = [0], [0]
        for length in extend_lens:
            token_starts.append(token_starts[-1] + length)
            chunks = length // checkpoint_every if checkpoint_every else -(-length // STEP_TOKENS)
            chunk_starts.append(chunk_starts[-1] + chunks)
        conv_rows, chunk_rows, chunk_targets, end_rows, end_targets = [], [], [], [], []
        for target, row in enumerate(self.rows):
            length = extend_lens[row.batch_row]
            assert 0 < row.offset <= length and row.offset % STEP_TOKENS == 0 and row.offset >= window
            end = token_starts[row.batch_row] + row.offset
            conv_rows.append(range(end - window, end))
            if row.offset == length:
                end_rows.append(row.batch_row)
                end_targets.append(target)
                continue
            if checkpoint_every:
                assert row.offset % checkpoint_every == 0
                chunk_rows.append(chunk_starts[row.batch_row] + row.offset // checkpoint_every - 1)
            else:
                chunk_rows.append(chunk_starts[row.batch_row] + row.offset // STEP_TOKENS)
            chunk_targets.append(target)
        self._sources = _Sources(
            conv_rows=torch.tensor([list(rows) for rows in conv_rows], dtype=torch.int64).to(
                device, non_blocking=True
            ),
            chunk_rows=torch.tensor(chunk_rows, dtype=torch.int64).to(device, non_blocking=True),
            chunk_numbers=chunk_rows,
            chunk_targets=chunk_targets,
            end_rows=torch.tensor(end_rows, dtype=torch.int64).to(device, non_blocking=True),
            end_targets=end_targets,
        )

    @property
    def prepared(self) -> bool:
        return self._sources is not None

    def capture_inputs(self, layer_id: int, raw_inputs: torch.Tensor) -> None:
        """Take the convolution windows of one layer. `raw_inputs` is ``[T, dim]`` before the convolution."""
        assert self._sources is not None and layer_id not in self._inputs_taken
        index = self._layer_index[layer_id]
        self._egress.windows(
            raw_inputs,
            self._sources.conv_rows,
            self._layout.conv_dtype,
            [views[index].conv for views in self._views],
        )
        self._inputs_taken.add(layer_id)

    def capture_states(
        self, layer_id: int, h: torch.Tensor | None, pool: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Take the temporal states of one layer.

        `h` is the kernel's per-chunk or periodic states (a leading 1 is allowed), `pool` the layer's slots
        ``[slots, HV, V, K]`` after the kernel wrote them, `slots` the batch's slot ids ``[B]``.
        """
        assert self._sources is not None and layer_id not in self._states_taken
        index = self._layer_index[layer_id]
        sources = self._sources
        if sources.chunk_targets:
            if h is None:
                raise RuntimeError(
                    f"layer {layer_id}: the linear-attention kernel returned no intermediate states to capture"
                )
            self._egress.states(
                h.view(-1, *self._layout.temporal_shape),
                sources.chunk_rows,
                self._layout.temporal_dtype,
                [self._views[target][index].temporal for target in sources.chunk_targets],
                sources.chunk_numbers,
            )
        if sources.end_targets:
            self._egress.states(
                pool,
                slots[sources.end_rows].to(torch.int64),
                self._layout.temporal_dtype,
                [self._views[target][index].temporal for target in sources.end_targets],
            )
        self._egress.layer_ends()
        self._states_taken.add(layer_id)

    def finish(self) -> None:
        """End of the forward pass: every planned layer was captured, or the server must stop.

        Raises:
            AssertionError: the plan was lost on its way to the layers. Publishing would store stale bytes.
        """
        assert not self.finished, "one capture was used for two forward passes"
        wanted = set(self._layout.layer_ids)
        assert self._inputs_taken == wanted and self._states_taken == wanted, (
            f"planned {len(self.rows)} checkpoints over {len(wanted)} layers, captured "
            f"{len(self._inputs_taken)} convolution windows and {len(self._states_taken)} states"
        )
        self._mark = self._egress.mark()
        self.finished = True

    def drain(self) -> None:
        """Wait for the copies of a capture that will not be published."""
        self._egress.drain()

    def done(self) -> bool:
        """Return True once the bytes are in the records."""
        return self._mark is not None and self._mark.reached(Rule.HANDOVER)
