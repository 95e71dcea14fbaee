"""docs/figures/life.svg: what happens to one request with an internal hit, and to the same one without a checkpoint.

Times are those of the simulator's cost model, Qwen3.5-9B on one H100; nothing else runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from eval.handbook.svg import BLUE, GREEN, GREY, ORANGE, PINK, RED, Picture
from eval.simulate.costs import Costs

PROMPT, HIT, CHECKPOINT = 40_000, 30_000, 28_672
"""Tokens: of the prompt; up to where its KV is on the host; up to where a checkpoint is on the SSD."""


@dataclass(frozen=True)
class Span:
    """One thing that takes time, milliseconds from the arrival."""

    lane: str
    what: str
    start_ms: float
    end_ms: float
    colour: str


def spans(costs: Costs) -> list[Span]:
    """Return what happens with HiState, and without a checkpoint inside the prompt."""
    read_s = costs.ssd_latency_s + costs.ssd_state_bytes / costs.ssd_read_bytes_s
    load_s = (CHECKPOINT * costs.kv_token_bytes + costs.state_bytes) / costs.pcie_bytes_s
    # A layer is computed when its own KV is there: the step ends when both have.
    step_s = max(costs.prefill_s(PROMPT - CHECKPOINT, CHECKPOINT), load_s)
    captured_s = costs.state_bytes / costs.pcie_bytes_s
    written_s = costs.ssd_state_bytes / costs.ssd_write_bytes_s
    end = read_s + step_s
    timed = [
        ("SSD", "read one checkpoint", 0.0, read_s, ORANGE),
        ("host to device", "KV and state, layer by layer", read_s, read_s + load_s, GREEN),
        ("GPU", f"compute {PROMPT - CHECKPOINT:,} tokens, capture states", read_s, end, BLUE),
        ("device to host", "captured states", end, end + captured_s, PINK),
        ("SSD ", "write them", end + captured_s, end + captured_s + written_s, ORANGE),
        ("GPU, no checkpoint", f"compute all {PROMPT:,} tokens", 0.0, costs.prefill_s(PROMPT), RED),
    ]
    return [Span(lane, what, start * 1e3, stop * 1e3, colour) for lane, what, start, stop, colour in timed]


def picture() -> str:
    """Return the figure."""
    found = spans(Costs())
    left, top, width, lane_height = 150, 50, 540, 34
    last = max(span.end_ms for span in found)
    scale = width / last
    made = Picture(860, top + lane_height * len(found) + 60, "The life of one request with an internal hit")
    made.words(left, 22, f"A prompt of {PROMPT:,} tokens; KV of {HIT:,} on the host, checkpoint at {CHECKPOINT:,} on the SSD", bold=True, size=13)  # fmt: skip
    bottom = top + lane_height * len(found)
    for tick in range(0, int(last) + 1, 200):
        x = left + tick * scale
        made.line([(x, top), (x, bottom)], "#dddddd")
        made.words(x, bottom + 16, f"{tick}", size=11, anchor="middle")
    made.words(left + width / 2, bottom + 36, "milliseconds from the arrival (cost model of eval.simulate: Qwen3.5-9B, one H100)", size=11, anchor="middle")  # fmt: skip
    first = next(span.end_ms for span in found if span.lane == "GPU")
    made.line([(left + first * scale, top - 8), (left + first * scale, bottom)], "#222222", 1, "2 3")
    made.words(left + first * scale + 4, top - 10, f"first token after {first:,.0f} ms", size=11)
    for row, span in enumerate(found):
        y = top + lane_height * row
        made.words(left - 10, y + 20, span.lane.strip(), anchor="end")
        made.line([(left, y + lane_height), (left + width, y + lane_height)], "#eeeeee")
        x, length = left + span.start_ms * scale, max(1.5, (span.end_ms - span.start_ms) * scale)
        made.rectangle(x, y + 6, length, lane_height - 12, span.colour)
        label = f"{span.what}, {span.end_ms - span.start_ms:,.0f} ms"
        if length > 260:
            made.words(x + 8, y + 21, label, colour="#ffffff")
        else:
            made.words(x + length + 8, y + 21, label, colour=GREY if length < 2 else "#222222")
    return made.text()
