"""What HiState costs where nothing can be reused: two servers up at once, asked in turn, pair by pair.

Both get the same new random prompt, in the order A B, then B A, and so on, so that a slow spell of the machine
hits both. The result is a ratio of medians within one run; its spread comes from drawing the pairs again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from eval.internal_hits.cases import ZERO_REUSE, Draw
from eval.internal_hits.records import Record, record_of
from eval.internal_hits.systems import Running

LENGTHS = (2048, 8192)
LIMIT = 1.05
_WARM_UP_PAIRS = 1
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Median of HiState over median of `against`, with the middle 95 % of resampled pairs."""

    against: str
    length: int
    pairs: int
    unit: str  # "ttft" or "cpu"
    histate_median_s: float
    other_median_s: float
    ratio: float
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        return self.__dict__.copy()


def measure(
    histate: Running, other: Running, lengths: dict[int, int], seed: int, say: Callable[[str], None]
) -> tuple[list[Record], list[Ratio]]:
    """Ask both servers `lengths[length]` pairs of prompts of each length. Both are emptied once, at the start."""
    records: list[Record] = []
    ratios = []
    for running in (histate, other):
        running.flush()
    for length, pairs in lengths.items():
        draw = Draw(f"{seed}/{ZERO_REUSE}/{other.name}/{length}")
        measured: list[tuple[Record, Record]] = []
        for pair in range(pairs + _WARM_UP_PAIRS):
            prompt = draw.tokens(length)
            order = (histate, other) if pair % 2 == 0 else (other, histate)
            answers = {
                running.name: _ask(running, prompt, f"{length} new, beside {other.name}", pair)
                for running in order
            }
            if pair >= _WARM_UP_PAIRS:
                measured.append((answers[histate.name], answers[other.name]))
                records += answers.values()
        ratios.append(ratio_of(measured, other.name, length, "ttft"))
        if all(record.cpu_s is not None for both in measured for record in both):
            ratios.append(ratio_of(measured, other.name, length, "cpu"))
        last = ratios[-2] if ratios[-1].unit == "cpu" else ratios[-1]
        say(
            f"  zero reuse, {length} tokens against {other.name}: {last.ratio:.3f} ({last.low:.3f} to {last.high:.3f})"
        )
    return records, ratios


def _ask(running: Running, prompt: list[int], row: str, pair: int) -> Record:
    answer, cpu_s = running.ask_counting(prompt, 4)
    return record_of(
        answer,
        case=ZERO_REUSE,
        row=row,
        system=running.name,
        repeat=len(prompt),
        step=pair,
        reusable=0,
        cpu_s=cpu_s,
    )


def ratio_of(pairs: list[tuple[Record, Record]], against: str, length: int, unit: str) -> Ratio:
    """Build the ratio of `unit` from (HiState, other) pairs."""

    def value(record: Record) -> float:
        return record.ttft_s if unit == "ttft" else float(record.cpu_s or 0.0)

    values = [(value(first), value(second)) for first, second in pairs]
    low, high = spread(values)
    top, bottom = median(first for first, _ in values), median(second for _, second in values)
    return Ratio(against, length, len(values), unit, top, bottom, top / bottom, low, high)


def spread(values: list[tuple[float, float]], seed: int = 0) -> tuple[float, float]:
    """Return the middle 95 % of the ratio of medians when the pairs are drawn again with replacement."""
    draw = random.Random(seed)
    ratios = []
    for _ in range(_RESAMPLES):
        sample = draw.choices(values, k=len(values))
        ratios.append(median(first for first, _ in sample) / median(second for _, second in sample))
    ratios.sort()
    return ratios[round(0.025 * (_RESAMPLES - 1))], ratios[round(0.975 * (_RESAMPLES - 1))]
