"""`histate size --trace`: serve recorded sessions on the sized machine, in the simulator of the folder `eval`."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_histate.cli.size.bytes import Sizes
from sglang_histate.cli.size.errors import SizeError
from sglang_histate.cli.size.model import ModelShape
from sglang_histate.cli.size.plan import Plan
from sglang_histate.cli.size.weights import Weights

SYSTEMS = ("infinite", "histate", "histate-lru", "histate-none", "hicache", "none")
_WEIGHTS_9B = 15.9e9  # bytes that a step reads of the model whose times the cost model knows


@dataclass(frozen=True)
class Load:
    """Which requests, and how many sessions at a time."""

    trace: str
    live: int


@dataclass(frozen=True)
class Simulated:
    """The table for a terminal, and the figures of `eval.metrics` (summary.json)."""

    table: str
    summary: dict[str, Any]


def check() -> None:
    """Refuse to simulate where the simulator is not: it is no part of the installed package.

    Raises:
        SizeError: the way out.
    """
    try:
        there = importlib.util.find_spec("eval.simulate") is not None
    except ImportError:  # no eval at all, or another one
        there = False
    if not there:
        raise SizeError(
            "--trace needs the simulator, the folder eval/ of the repository, which is not installed: run `python -m "
            "sglang_histate.cli size` in a clone, or leave --trace out"
        )


def costs_of(shape: ModelShape, sizes: Sizes, weights: Weights, given: Sequence[str] = ()) -> Any:
    """Return the simulator's costs for this model on H100s: sizes exact, times scaled from the 9B model's.

    Ranks share compute, links and the reading of weights evenly; what they tell each other is left out.

    Raises:
        SizeError: a `--cost` is none.
    """
    import argparse

    from eval.simulate.cost_flag import constant
    from eval.simulate.costs import Costs

    usual, ranks = Costs(), sizes.ranks
    active = shape.mixer_weights + shape.mlp_active + shape.vocabulary * shape.hidden
    read = weights.size_bytes * active / shape.all_weights
    values: dict[str, float] = {
        "kv_token_bytes": sizes.kv_token_bytes * ranks,
        "state_bytes": sizes.checkpoint_bytes * ranks,
        "ssd_state_share": sizes.stored_bytes / sizes.checkpoint_bytes,
        "linear_flop": shape.token_flop,
        "pair_flop": shape.pair_flop,
        "peak_flop_s": usual.peak_flop_s * ranks,
        "pcie_bytes_s": usual.pcie_bytes_s * ranks,
        "step_s": usual.step_s * read / _WEIGHTS_9B / ranks,
        "step_request_s": usual.step_request_s * sizes.checkpoint_bytes / usual.state_bytes,
        "step_token_s": usual.step_token_s * sizes.kv_token_bytes / usual.kv_token_bytes,
    }
    try:
        return Costs(**{**values, **dict(constant(text) for text in given)})  # type: ignore[arg-type]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise SizeError(f"--cost: {error}") from None


def simulated(load: Load, costs: Any, found: Plan, chunk_tokens: int) -> Simulated:
    """Serve the trace with every system; a bar tells how far it is.

    Raises:
        SizeError: no such trace, nothing in it, or a request that does not fit on the device.
    """
    from eval.metrics import compare, summary, text_table
    from eval.metrics import load as load_runs
    from eval.simulate.budgets import Budgets
    from eval.simulate.inputs import Workload
    from eval.simulate.run import Setting, simulate
    from sglang_histate.cli.progress import progress

    budgets = Budgets(*(found.tier(name).size_bytes for name in ("device", "host", "ssd")))
    try:
        workload = Workload(load.trace)
        sessions = workload.sessions()
        setting = Setting(workload.name, "histate size", load.live, 60.0, chunk_tokens, costs, budgets)
        with tempfile.TemporaryDirectory(prefix="histate-size-") as folder:
            paths = [Path(folder) / f"{system}.jsonl" for system in SYSTEMS]
            with progress(len(SYSTEMS), "system", "simulate") as tell:
                for system, path in zip(SYSTEMS, paths, strict=True):
                    simulate(system, sessions, setting, path)
                    tell(1)
            runs = load_runs(paths)
            return Simulated(text_table(compare(runs), "hicache"), summary(runs, "hicache"))
    except (ValueError, OSError) as error:
        raise SizeError(f"--trace {load.trace}: {error}") from None
