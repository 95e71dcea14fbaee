"""docs/figures/interval.svg: the interval that the policy chooses, over the pressure, for three lengths of a segment."""

from __future__ import annotations

import math

from eval.handbook.svg import BLUE, GREEN, GREY, INK, ORANGE, Picture
from eval.simulate.costs import Costs
from sglang_histate.policy.interval import (
    DEFAULT_INTERVALS,
    NO_INTERVAL,
    choose_interval,
    continuous_interval,
)
from sglang_histate.policy.residence import MAX_PRESSURE, MIN_PRESSURE

SEGMENTS = ((2048, ORANGE), (8192, BLUE), (32768, GREEN))
STEPS = 161
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 40, 520, 280
_LOW, _HIGH = 256, 32768  # where "none" is drawn, one step above the widest


def pressures() -> list[float]:
    """Return the pressures of the x axis, evenly on a logarithmic scale."""
    low, high = math.log2(MIN_PRESSURE), math.log2(MAX_PRESSURE)
    return [2 ** (low + (high - low) * step / (STEPS - 1)) for step in range(STEPS)]


def chosen(segment: int) -> list[int]:
    """Return the interval at each of `pressures` for the 9B model's checkpoints."""
    return [choose_interval(segment, DEFAULT_INTERVALS, Costs().state_tokens, p) for p in pressures()]


def picture() -> str:
    """Return the figure."""
    made = Picture(720, 380, "Interval between checkpoints by pressure, as the policy chooses it")
    made.words(
        _LEFT, 22, "Interval between checkpoints, tokens (Qwen3.5-9B, N_s = 1,572)", bold=True, size=13
    )
    ticks = [one for one in DEFAULT_INTERVALS if one != NO_INTERVAL]
    for interval in (*ticks, _HIGH):
        y = _y(interval)
        made.line([(_LEFT, y), (_LEFT + _WIDTH, y)], "#dddddd")
        made.words(_LEFT - 8, y + 4, "none" if interval == _HIGH else f"{interval:,}", size=11, anchor="end")
    for exponent in range(-4, 5):
        x = _x(2.0**exponent)
        made.line([(x, _TOP), (x, _TOP + _HEIGHT)], "#eeeeee")
        label = f"1/{2**-exponent}" if exponent < 0 else str(2**exponent)
        made.words(x, _TOP + _HEIGHT + 18, label, size=11, anchor="middle")
    made.words(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 40, "pressure T_KV / T_state: checkpoints plentiful (left), short (right)", size=12, anchor="middle")  # fmt: skip
    for segment, colour in SEGMENTS:
        steps = list(zip(pressures(), chosen(segment), strict=True))
        smooth = [(p, continuous_interval(segment, Costs().state_tokens, p)) for p in pressures()]
        made.line([(_x(p), _y(value)) for p, value in smooth if _LOW <= value <= _HIGH], colour, 1, "3 3")
        points: list[tuple[float, float]] = []
        for pressure, interval in steps:
            y = _y(interval or _HIGH)
            if points and points[-1][1] != y:
                points.append((_x(pressure), points[-1][1]))
            points.append((_x(pressure), y))
        made.line(points, colour, 2.5)
    for row, (segment, colour) in enumerate(SEGMENTS):
        y = _TOP + 20 + 22 * row
        made.line([(_LEFT + _WIDTH + 12, y - 4), (_LEFT + _WIDTH + 36, y - 4)], colour, 2.5)
        made.words(_LEFT + _WIDTH + 42, y, f"{segment:,} new", size=11)
    y = _TOP + 20 + 22 * len(SEGMENTS)
    made.line([(_LEFT + _WIDTH + 12, y - 4), (_LEFT + _WIDTH + 36, y - 4)], GREY, 1, "3 3")
    made.words(_LEFT + _WIDTH + 42, y, "I*, any width", size=11, colour=INK)
    return made.text()


def _x(pressure: float) -> float:
    low, high = math.log2(MIN_PRESSURE), math.log2(MAX_PRESSURE)
    return _LEFT + _WIDTH * (math.log2(pressure) - low) / (high - low)


def _y(interval: float) -> float:
    share = (math.log2(interval) - math.log2(_LOW)) / (math.log2(_HIGH) - math.log2(_LOW))
    return _TOP + _HEIGHT * (1 - share)
