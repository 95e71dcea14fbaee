"""``python -m eval.report.seeds``: rewriting requests of the same workload with several seeds, taken together.

One run of it has some dozens of them, and a few decide its mean. Each folder is one seed; folders whose workloads differ in
the seed only make one row. In brackets: the change of the mean time to first token against the baseline in percent, and its
95 % interval by drawing sessions of all seeds with replacement.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.arguments import with_examples
from eval.metrics import Comparison, NotComparable, compare, load
from eval.metrics.bootstrap import RESAMPLES, SEED, draw_sessions, interval_of
from eval.metrics.runs import Key, place
from eval.metrics.system_figures import SSD_WRITTEN
from eval.records import Record, RecordsError
from eval.report.tables import table

_SEED = re.compile(r"-seed\d+")


class Refused(ValueError):
    """The folders make no table, in one sentence."""


@dataclass(frozen=True)
class Pooled:
    """One system over all seeds of one workload. Shares of 1, times in seconds, changes of 1 (-0.2: a fifth less)."""

    requests: int
    mean_s: float
    change: float
    low: float
    high: float
    reusable_share: float
    written_gb: float | None


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        rows = pooled([compare(load([folder])) for folder in options.runs], options.baseline)
    except (RecordsError, NotComparable, Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(rows, options.baseline))
    return 0


def pooled(seeds: Sequence[Comparison], baseline: str) -> dict[str, dict[str, Pooled]]:
    """Return each workload's systems, in the order of tables.

    Raises:
        Refused: a folder has no run of the baseline or no rewriting request, or seeds of one workload have other systems or
            settings.
    """
    groups: dict[str, list[Comparison]] = {}
    for seed in seeds:
        groups.setdefault(_SEED.sub("", seed.workload), []).append(seed)
    return {workload: _group(workload, group, baseline) for workload, group in groups.items()}


def _group(workload: str, seeds: Sequence[Comparison], baseline: str) -> dict[str, Pooled]:
    names = sorted(seeds[0].systems, key=place)
    steps = {run.facts.facts.get("chunk_tokens") for seed in seeds for run in seed.runs}
    if any(set(seed.systems) != set(names) for seed in seeds) or len(steps) > 1:
        raise Refused(f"{workload}: seeds have different systems or settings: give folders of equal commands")
    if len({seed.workload for seed in seeds}) < len(seeds):
        raise Refused(f"{workload}: one seed is given twice")
    if baseline not in names:
        raise Refused(f"{workload}: no run of {baseline}: name one of {', '.join(names)} by --baseline")
    found = {name: [_rewriting(seed, name) for seed in seeds] for name in names}
    if not all(found[baseline]):
        raise Refused(f"{workload}: a seed has no rewriting request")
    base = _sums(found[baseline])
    draws = draw_sessions(len(base), RESAMPLES, SEED)
    return {
        name: _pool(records, _sums(records), base, draws, _written(seeds, name))
        for name, records in found.items()
    }


def _rewriting(seed: Comparison, name: str) -> dict[Key, Record]:
    return {record.key: record for run in seed.systems[name] for record in run.good if record.rewrite}


def _sums(seeds: Sequence[dict[Key, Record]]) -> np.ndarray:
    """Times and number of the rewriting requests of each session of each seed: shape [sessions, 2]."""
    units: dict[tuple[int, str], list[float]] = {}
    for number, seed in enumerate(seeds):
        for record in seed.values():
            times = units.setdefault((number, record.session), [0.0, 0.0])
            times[0] += record.ttft_s
            times[1] += 1
    return np.array([units[unit] for unit in sorted(units)])


def _pool(
    seeds: Sequence[dict[Key, Record]],
    sums: np.ndarray,
    base: np.ndarray,
    draws: np.ndarray,
    written_gb: float | None,
) -> Pooled:
    if sums.shape != base.shape or (sums[:, 1] != base[:, 1]).any():
        raise Refused("systems have different rewriting requests: some failed, run them again")
    records = [record for seed in seeds for record in seed.values()]
    drawn = (draws @ sums[:, 0]) / (draws @ base[:, 0]) - 1
    spread = interval_of(drawn)
    assert spread is not None, "every session here has a rewriting request"
    return Pooled(
        len(records),
        float(sums[:, 0].sum() / sums[:, 1].sum()),
        float(sums[:, 0].sum() / base[:, 0].sum() - 1),
        spread.low,
        spread.high,
        sum(min(record.hit, record.reusable) for record in records)
        / sum(record.reusable for record in records),
        written_gb,
    )


def _written(seeds: Sequence[Comparison], name: str) -> float | None:
    """Return the mean of the SSD bytes that a run wrote, in GB."""
    written = [run.facts.facts.get(SSD_WRITTEN) for seed in seeds for run in seed.systems[name]]
    known = [one for one in written if isinstance(one, int)]
    return sum(known) / len(known) / 1e9 if known else None


def markdown(rows: dict[str, dict[str, Pooled]], baseline: str) -> str:
    """A table for each workload."""
    parts = []
    for workload, systems in rows.items():
        requests = next(iter(systems.values())).requests
        lines = [
            [
                name,
                f"{one.mean_s:.3f}",
                ""
                if name == baseline
                else f"{_percent(one.change)} [{_percent(one.low)}, {_percent(one.high)}]",
                f"{100 * one.reusable_share:.1f}",
                "-" if one.written_gb is None else f"{one.written_gb:.0f}",
            ]
            for name, one in systems.items()
        ]
        head = ("system", "mean TTFT s", f"against {baseline}", "reusable %", "SSD written GB")
        parts.append(f"{workload}, {requests} rewriting requests\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report.seeds",
        description="Print (Markdown) what rewriting requests take, over several seeds of a workload.",
        epilog="Exit code: 0 printed, 2 a file is missing or wrong, or the folders make no table.",
    )
    with_examples(parser, "python -m eval.report.seeds build/eval/rewriting-10-*")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a folder of eval.simulate: one seed"
    )
    parser.add_argument(
        "--baseline", default="histate", help="system that the others are compared with (histate)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
