"""The answer of `histate size` as text and as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_histate.cli.size.bytes import Sizes
from sglang_histate.cli.size.plan import PRESSURES, SEGMENTS, Plan, intervals
from sglang_histate.policy.interval import NO_INTERVAL
from sglang_histate.sizes import format_size


def as_json(sizes: Sizes, found: Plan, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything; intervals are tokens, null for none."""
    return {
        **facts,
        "per_rank": {**asdict(sizes), "checkpoint_in_kv_tokens": round(sizes.checkpoint_tokens, 1)},
        "tiers": {tier.name: asdict(tier) for tier in found.tiers},
        "intervals": {
            str(segment): {
                f"{pressure:g}": interval or None for pressure, interval in _by_pressure(segment, sizes)
            }
            for segment in SEGMENTS
        },
        "expected_intervals": [
            {**asdict(one), "interval": one.interval or None, "pressure": round(one.pressure, 4)}
            for one in found.expected
        ],
    }


def as_text(sizes: Sizes, found: Plan, facts: dict[str, Any]) -> str:
    """Return the tables for a terminal."""
    rank = " per rank" if sizes.ranks > 1 else ""
    lines = [
        f"{facts['model']}: {facts['architecture']}, {facts['full_layers']} full-attention and "
        f"{facts['linear_layers']} linear layers, {sizes.ranks} rank{'s' if sizes.ranks > 1 else ''}",
        f"weights     {format_size(facts['weight_bytes'])} ({facts['weight_source']})",
        f"KV          {sizes.kv_token_bytes:,} B per token{rank}",
        f"checkpoint  {sizes.checkpoint_bytes:,} B{rank}; on the SSD {sizes.stored_bytes:,} B ({facts['checkpoint_dtype']}), "
        f"in a slab of {sizes.slab_bytes:,} B",
        f"N_s         {sizes.checkpoint_tokens:,.0f} tokens of KV cost what one checkpoint on the SSD costs",
        "",
        f"{'tier':<8}{'bytes':>12}{'KV tokens, or':>18}{'checkpoints, or':>18}"
        f"{'sessions of ' + format(facts['session_tokens'], ','):>22}",
        *(
            f"{tier.name:<8}{format_size(tier.size_bytes):>12}{tier.kv_tokens:>18,}{tier.checkpoints:>18,}{tier.sessions:>22,}"
            for tier in found.tiers
        ),
        "",
        "interval between checkpoints, tokens, by pressure T_KV / T_state",
        f"{'new tokens':<12}" + "".join(f"{pressure:>9g}" for pressure in PRESSURES) + f"{'expected':>12}",
    ]
    for segment, expected in zip(SEGMENTS, found.expected, strict=True):
        cells = "".join(f"{_name(interval):>9}" for _, interval in _by_pressure(segment, sizes))
        lines.append(
            f"{segment:<12,}{cells}{_name(expected.interval):>12} at pressure {expected.pressure:.2g}"
        )
    return "\n".join(lines)


def _by_pressure(segment: int, sizes: Sizes) -> list[tuple[float, int]]:
    return list(intervals(segment, sizes.checkpoint_tokens).items())


def _name(interval: int) -> str:
    return "none" if interval == NO_INTERVAL else f"{interval:,}"
