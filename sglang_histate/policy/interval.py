"""How far apart the interior checkpoints of a new segment are placed (arXiv:2610.41508).

Owns the cost of an interval and the choice among the supported ones. It does not know where the checkpoints
land (`capture_plan`) nor how the pressure is measured: residence times are somebody else's, their ratio is an
argument here.

Every length, interval and cost is in tokens. A checkpoint counts as the number of tokens whose KV takes the
same number of bytes, so that recomputing and storing have one unit and can be added.

    policy = parse_interval("adaptive")                  # or "none", "fixed:1024"
    check_grid(policy.supported, grid=64)                # once, when the page size is known
    interval = policy.choose(8000, state_tokens=1572.0, pressure=0.5)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

NO_INTERVAL = 0
"""The interval "none": no interior checkpoint. It counts as wider than every number."""

STEP_TOKENS = 64
"""Recurrent kernels yield their state every 64 tokens, so intervals and positions are multiples of it."""

DEFAULT_INTERVALS = (256, 512, 1024, 2048, 4096, 8192, 16384, NO_INTERVAL)
"""Supported intervals in tokens unless configured otherwise, narrowest first."""


@dataclass(frozen=True)
class IntervalPolicy:
    """Chooses the interval of each new segment from a fixed set.

    `supported` is in tokens: multiples of 64, ascending, no repeats, `NO_INTERVAL` last if present. A set of
    one is a fixed interval, whatever the segment and the pressure. `at_steps`: no interval at all, instead wherever
    a scheduler step happens to end on a block boundary (what vLLM's "align" saves). `scarce`: storage costs what the SSD
    gives up for it (`scarcity`), not N_s x pressure. `learned`: no interval, but the places where hits are expected
    (`segment_plan`).

    Raises:
        ValueError: with one sentence that names the offending value.
    """

    supported: tuple[int, ...] = DEFAULT_INTERVALS
    at_steps: bool = False
    scarce: bool = False
    learned: bool = False

    def __post_init__(self) -> None:
        if not self.supported:
            raise ValueError("the set of intervals is empty: name at least one, or none")
        for interval in self.supported:
            if interval != NO_INTERVAL and not _is_allowed(interval):
                raise ValueError(
                    f"interval {interval} is not allowed: use a positive multiple of {STEP_TOKENS}, or none"
                )
        for narrow, wide in pairwise(self.supported):
            if _width(narrow) >= _width(wide):
                raise ValueError(
                    f"interval {_name(wide)} comes after {_name(narrow)}: "
                    "intervals must ascend without repeats, and none comes last"
                )

    def choose(self, length: int, state_tokens: float, pressure: float = 1.0) -> int:
        """Return the interval in tokens for a segment; arguments and errors as in `choose_interval`."""
        if len(self.supported) == 1:
            return self.supported[0]
        return choose_interval(length, self.supported, state_tokens, pressure)


def choose_interval(length: int, supported: Iterable[int], state_tokens: float, pressure: float = 1.0) -> int:
    """Return the supported interval with the lowest recompute + storage; ties go to the wider one.

    Costs are compared as exact integers, so equal costs are equal on every machine. A higher pressure never
    gives a narrower interval. A longer segment may: 512 tokens at 120 tokens a checkpoint are worth one at
    256, 513 are worth none, 768 are worth one at 512, because a checkpoint just before the end saves little
    and costs the same. Longer is never narrower between lengths that are whole multiples, two or more, of
    every supported interval.

    Args:
        length: tokens of the new segment, >= 0.
        supported: intervals in tokens, > 0 or `NO_INTERVAL`, in any order.
        state_tokens: N_s, bytes of one checkpoint / bytes of KV per token.
        pressure: T_KV / T_state, mean residence of KV over that of checkpoints on ssd; 1 = equal.

    Raises:
        ValueError: nothing supported, a negative length or interval, or a negative or non-finite
            `state_tokens` or `pressure`.
    """
    _check_length(length)
    # Both costs times 2 * length * denominator are whole numbers: no rounding decides between candidates.
    numerator, denominator = _checkpoint_cost(state_tokens, pressure).as_integer_ratio()
    storage_scale = 2 * length * numerator
    best, best_cost = -1, 0
    for interval in supported:
        cost = (
            _twice_distance_sum(length, interval) * denominator
            + interior_count(length, interval) * storage_scale
        )
        if best < 0 or cost < best_cost or (cost == best_cost and _width(interval) > _width(best)):
            best, best_cost = interval, cost
    if best < 0:
        raise ValueError("the set of intervals is empty: name at least one, or none")
    return best


def recompute_tokens(length: int, interval: int) -> float:
    """Return the expected tokens to recompute for a hit inside a segment with checkpoints every `interval`.

    The hit position h is uniform over the segment's `length` token positions, h = 0 .. length-1 tokens past
    its start. The nearest checkpoint at or before h lies h mod interval back (the start counts as one; with
    `NO_INTERVAL` it is the only one), so the result is the sum of h mod interval over all h, divided by
    length: with q full pieces and r tokens left, (q * interval * (interval-1) + r * (r-1)) / (2 * length).
    The segment's end is no interior position: its checkpoint is always captured. An empty segment costs 0.

    Raises:
        ValueError: negative `length` or `interval`.
    """
    _check_length(length)
    _check_interval(interval)
    if length == 0:
        return 0.0
    return _twice_distance_sum(length, interval) / (2 * length)


def storage_tokens(length: int, interval: int, state_tokens: float, pressure: float) -> float:
    """Return the cost in tokens of keeping a segment's interior checkpoints: count * N_s * pressure.

    Raises:
        ValueError: negative `length` or `interval`; negative or non-finite `state_tokens` or `pressure`.
    """
    _check_length(length)
    return interior_count(length, interval) * _checkpoint_cost(state_tokens, pressure)


def interior_count(length: int, interval: int) -> int:
    """Return how many k >= 1 have k * interval < length: the checkpoints strictly inside the segment."""
    _check_interval(interval)
    if interval == NO_INTERVAL or length == 0:
        return 0
    return (length - 1) // interval


def continuous_interval(length: int, state_tokens: float, pressure: float = 1.0) -> float:
    """Return I* = sqrt(2 * length * N_s * pressure) in tokens, the best interval if any were supported.

    It minimises I / 2 + (length / I) * N_s * pressure. For explanations and tests: `choose_interval` never
    uses it.

    Raises:
        ValueError: negative `length`; negative or non-finite `state_tokens` or `pressure`.
    """
    _check_length(length)
    return math.sqrt(2 * length * _checkpoint_cost(state_tokens, pressure))


def parse_interval(text: str, supported: tuple[int, ...] = DEFAULT_INTERVALS) -> IntervalPolicy:
    """Return the policy named ``adaptive`` or ``scarce`` (choose from `supported`), ``learned``, ``align``, ``none`` or
    ``fixed:N`` (N tokens).

    Raises:
        ValueError: with one sentence that names the value and what is allowed.
    """
    value = text.strip()
    if value == "adaptive":
        return IntervalPolicy(supported)
    if value == "scarce":
        return IntervalPolicy(supported, scarce=True)
    if value == "learned":
        return IntervalPolicy((NO_INTERVAL,), learned=True)
    if value == "none":
        return IntervalPolicy((NO_INTERVAL,))
    if value == "align":
        return IntervalPolicy((NO_INTERVAL,), at_steps=True)
    mode, _, number = value.partition(":")
    interval = _parse_tokens(number)
    if mode != "fixed" or interval is None:
        raise ValueError(
            f"{text!r} is not an interval: write adaptive, scarce, learned, align, none, or fixed:N "
            f"with N a multiple of {STEP_TOKENS}, such as fixed:1024"
        )
    return IntervalPolicy((interval,))


def parse_intervals(text: str) -> tuple[int, ...]:
    """Return the supported set that a list such as ``256,512,none`` names, in tokens, `NO_INTERVAL` for none.

    Raises:
        ValueError: with one sentence that names the value and what is allowed.
    """
    intervals = []
    for part in text.split(","):
        value = part.strip()
        interval = NO_INTERVAL if value == "none" else _parse_tokens(value)
        if interval is None:
            raise ValueError(
                f"{value!r} in {text!r} is not an interval: write multiples of {STEP_TOKENS} "
                "in ascending order, separated by commas, with none last if wanted, such as 256,512,none"
            )
        intervals.append(interval)
    return IntervalPolicy(tuple(intervals)).supported


def check_grid(intervals: Iterable[int], grid: int) -> None:
    """Check that every interval is a multiple of `grid`, the least common multiple of 64 and the page size.

    Raises:
        ValueError: with one sentence that names the interval that is no multiple of the grid.
    """
    if not _is_allowed(grid):
        raise ValueError(f"grid {grid} is not a positive multiple of {STEP_TOKENS}")
    for interval in intervals:
        if interval % grid:
            raise ValueError(
                f"interval {interval} is not a multiple of {grid} tokens, the least common multiple of "
                f"{STEP_TOKENS} and the page size: use multiples of {grid} or a smaller page size"
            )


def _twice_distance_sum(length: int, interval: int) -> int:
    """Twice the sum of h mod interval over h = 0 .. length-1, a whole number."""
    if interval == NO_INTERVAL or interval >= length:
        return length * (length - 1)
    pieces, rest = divmod(length, interval)
    return pieces * interval * (interval - 1) + rest * (rest - 1)


def _checkpoint_cost(state_tokens: float, pressure: float) -> float:
    """What keeping one checkpoint costs, in tokens."""
    cost = float(state_tokens * pressure)
    if not (state_tokens >= 0 and pressure >= 0 and cost < math.inf):
        raise ValueError(
            f"state_tokens {state_tokens} and pressure {pressure} must not be negative, "
            "and they and their product must be finite"
        )
    return cost


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(f"segment length {length} is negative")


def _check_interval(interval: int) -> None:
    if interval < 0:
        raise ValueError(
            f"interval {interval} is negative: use a number of tokens, or {NO_INTERVAL} for none"
        )


def _is_allowed(tokens: int) -> bool:
    return tokens >= STEP_TOKENS and tokens % STEP_TOKENS == 0


def _width(interval: int) -> float:
    return math.inf if interval == NO_INTERVAL else interval


def _name(interval: int) -> str:
    return "none" if interval == NO_INTERVAL else str(interval)


def _parse_tokens(text: str) -> int | None:
    """The number of tokens `text` spells in plain digits if that is an allowed interval, else None."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        return None
    tokens = int(text)
    return tokens if _is_allowed(tokens) else None
