"""The comparison without a server, in seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from eval.eviction.budgets import Budgets, Units
from eval.eviction.requests import Request
from eval.eviction.rows import Mode, Row
from eval.eviction.simulation import Simulation


def simulate(requests: Sequence[Request], mode: Mode, budgets: Budgets, units: Units) -> Row:
    """Run all requests through the simulation.

    Raises:
        ValueError: a prompt does not fit the device.
    """
    begin = time.perf_counter()
    simulation = Simulation(budgets, units, mode.eviction, mode.tau)
    outcomes = simulation.run(requests)
    cached = sum(outcome.cached for outcome in outcomes)
    reusable = sum(request.reusable for request in requests)
    return Row(
        mode.name,
        len(requests),
        sum(outcome.prompt for outcome in outcomes),
        reusable,
        cached,
        reusable - cached,
        sum(outcome.with_kv for outcome in outcomes),
        simulation.tiers.evictions,
        wall_s=time.perf_counter() - begin,
    )
