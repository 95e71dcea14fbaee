"""What HiState costs where nothing can be reused: two servers up at once, asked in turn, pair by pair.

Both get the same new random prompt, in the order A B, then B A, and so on, so that a slow spell of the machine
hits both. Of two servers of one kind the one started later was seen to be 20 % faster on a virtual machine, so every
comparison is made twice, with either server started first, and the result is the geometric mean of the two ratios of
medians. Its spread comes from drawing the pairs of each half again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from eval.internal_hits.cases import ZERO_REUSE, Draw
from eval.internal_hits.records import Record, record_of
from eval.internal_hits.systems import Running
from eval.progress import each

LENGTHS = (2048, 8192)
LIMIT = 1.05
_WARM_UP_PAIRS = 3
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Median of HiState over median of `against`, with the middle 95 % of resampled pairs.

    `by_order` are the ratios with HiState started first and with the other started first; `ratio` is their
    geometric mean.
    """

    against: str
    length: int
    pairs: int
    unit: str  # "ttft" or "cpu"
    histate_median_s: float
    other_median_s: float
    ratio: float
    low: float
    high: float
    by_order: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return self.__dict__.copy()


Pairs = list[tuple[Record, Record]]


def measure(
    histate: Running, other: Running, lengths: dict[int, int], seed: str, say: Callable[[str], None]
) -> dict[int, Pairs]:
    """Ask both servers `lengths[length]` pairs of prompts of each length. Both are emptied once, at the start."""
    measured: dict[int, Pairs] = {}
    for running in (histate, other):
        running.flush()
    for length, pairs in lengths.items():
        draw = Draw(f"{seed}/{ZERO_REUSE}/{other.name}/{length}")
        kept = measured[length] = []
        for pair in each(range(pairs + _WARM_UP_PAIRS), f"{length} tokens", "pair"):
            prompt = draw.tokens(length)
            order = (histate, other) if pair % 2 == 0 else (other, histate)
            answers = {
                running.name: _ask(running, prompt, f"{length} new, beside {other.name}", pair)
                for running in order
            }
            if pair >= _WARM_UP_PAIRS:
                kept.append((answers[histate.name], answers[other.name]))
        say(f"  zero reuse, {length} tokens against {other.name}: {len(kept)} pairs")
    return measured


def ratios(halves: Sequence[dict[int, Pairs]], against: str) -> list[Ratio]:
    """Compare what `measure` returned with HiState started first and with the other started first."""
    found = []
    for length in halves[0]:
        pairs = [half[length] for half in halves]
        found.append(ratio_of(pairs, against, length, "ttft"))
        if all(record.cpu_s is not None for half in pairs for both in half for record in both):
            found.append(ratio_of(pairs, against, length, "cpu"))
    return found


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


def ratio_of(halves: Sequence[Pairs], against: str, length: int, unit: str) -> Ratio:
    """Build the ratio of `unit` from the (HiState, other) pairs of each start order."""

    def value(record: Record) -> float:
        return record.ttft_s if unit == "ttft" else float(record.cpu_s or 0.0)

    values = [[(value(first), value(second)) for first, second in pairs] for pairs in halves]
    by_order = tuple(_median_ratio(half) for half in values)
    low, high = spread(values)
    top = geometric_mean(median(first for first, _ in half) for half in values)
    bottom = geometric_mean(median(second for _, second in half) for half in values)
    count = sum(len(half) for half in values)
    return Ratio(against, length, count, unit, top, bottom, geometric_mean(by_order), low, high, by_order)


def spread(halves: Sequence[list[tuple[float, float]]], seed: int = 0) -> tuple[float, float]:
    """Return the middle 95 % of the mean ratio when the pairs of each half are drawn again with replacement."""
    draw = random.Random(seed)
    found = sorted(
        geometric_mean(_median_ratio(draw.choices(half, k=len(half))) for half in halves)
        for _ in range(_RESAMPLES)
    )
    return found[round(0.025 * (_RESAMPLES - 1))], found[round(0.975 * (_RESAMPLES - 1))]


def _median_ratio(values: list[tuple[float, float]]) -> float:
    return median(first for first, _ in values) / median(second for _, second in values)
