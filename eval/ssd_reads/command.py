"""Runs both measurements and says what was met."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.aligned import aligned
from eval.arguments import positive, size_bytes
from eval.progress import each
from eval.quantile import quantile
from sglang_histate.sizes import format_size
from sglang_histate.store import RecordKind

from .beside_writes import BesideWrites, Window, Writing
from .filled import Sizes, filled, in_file_order
from .restore import Pass, all_ways

DEPTHS = (1, 4)
RESTORE_TARGET = 0.9
BESIDE_TARGET = 1.25


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("read")
    group.add_argument("--layers", type=positive, default=24, help="recurrent layers of a checkpoint")
    group.add_argument("--records", type=positive, default=32, help="checkpoints, and as many KV extents")
    group.add_argument("--rounds", type=positive, default=6, help="of all ways of reading in turn")
    group.add_argument("--reads-per-s", type=float, default=5.0, help="beside the writer")
    group.add_argument("--seconds", type=float, default=8.0, help="of each round beside the writer")
    group.add_argument("--write-rate", type=size_bytes, default=200 << 20, help="the writer's budget")


def run(chosen: argparse.Namespace) -> bool:
    """Measure, print, and return whether all targets were met."""
    sizes = Sizes(chosen.layers, chosen.records)
    with tempfile.TemporaryDirectory(prefix="ssd-read-", dir=chosen.dir) as name:
        folder = Path(name)
        folder.chmod(0o700)
        store = filled(folder, sizes, chosen.write_rate)
        by_kind = {}
        for kind in RecordKind:
            entries = in_file_order(store, kind)
            by_kind[kind] = all_ways(store, sizes.path(folder), entries, DEPTHS, chosen.rounds)
        print(
            f"file of {format_size(sizes.file_bytes)}, {'direct' if store.stats().direct_io else 'BUFFERED'}, "
            f"{chosen.records} records of each kind, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}"
        )
        print(aligned(restore_lines(by_kind)))
        states = in_file_order(store, RecordKind.CHECKPOINT)
        beside = BesideWrites(store, states, chosen.reads_per_s, chosen.seconds)
        windows: dict[Writing, list[Window]] = {writing: [] for writing in Writing}
        for _ in each(range(chosen.rounds), "beside the writer", "round"):
            for writing in Writing:
                windows[writing].append(beside.window(writing))
        store.close(60.0)
    print(f"\ncheckpoints read at {chosen.reads_per_s:g} a second, load {os.getloadavg()[0]:.1f}")
    print(aligned(window_lines(windows)))
    plain = by_kind[RecordKind.CHECKPOINT][0]
    restores = {depth: ratio(by_kind[RecordKind.CHECKPOINT][depth], plain) for depth in DEPTHS}
    p95 = slower(windows, Writing.BUDGET, 0.95)
    targets = [
        *(
            (
                f"checkpoints, depth {depth}, at {reached:.3f} of the plain read, target {RESTORE_TARGET}",
                reached >= RESTORE_TARGET,
            )
            for depth, reached in restores.items()
        ),
        (
            f"p95 beside the writer at its budget {p95:.2f} x idle, target {BESIDE_TARGET}",
            p95 <= BESIDE_TARGET,
        ),
    ]
    for text, met in targets:
        print(f"{'met' if met else 'NOT MET'}: {text}")
    return all(met for _, met in targets)


def ratio(passes: Sequence[Pass], plain: Sequence[Pass]) -> float:
    """Return the median over the rounds of the speed relative to the plain read of the same round."""
    return statistics.median(one.mb_per_s / other.mb_per_s for one, other in zip(passes, plain, strict=True))


def restore_lines(by_kind: Mapping[RecordKind, Mapping[int, Sequence[Pass]]]) -> list[list[str]]:
    lines = [["kind, way", "MB/s", "ratio", "least", "most", "p50 ms", "p95 ms", "CPU ms/record", "readers"]]
    for kind, by_depth in by_kind.items():
        plain = by_depth[0]
        for depth, passes in by_depth.items():
            ratios = [one.mb_per_s / other.mb_per_s for one, other in zip(passes, plain, strict=True)]
            latencies = [1000 * one for item in passes for one in item.latencies_s]
            lines.append(
                [
                    f"{kind.value}, " + (f"store, depth {depth}" if depth else "plain read"),
                    f"{statistics.median(one.mb_per_s for one in passes):.0f}",
                    f"{statistics.median(ratios):.3f}",
                    f"{min(ratios):.3f}",
                    f"{max(ratios):.3f}",
                    f"{quantile(latencies, 0.5):.1f}",
                    f"{quantile(latencies, 0.95):.1f}",
                    f"{statistics.median(one.cpu_ms_per_record for one in passes):.1f}",
                    f"{statistics.median(one.readers_ms_per_record for one in passes):.1f}" if depth else "",
                ]
            )
    return lines


def slower(windows: Mapping[Writing, Sequence[Window]], writing: Writing, share: float) -> float:
    """Return a quantile of the latencies while `writing`, relative to that while nothing is written."""
    return quantile(latencies(windows[writing]), share) / quantile(latencies(windows[Writing.NOTHING]), share)


def latencies(windows: Sequence[Window]) -> list[float]:
    return [one for window in windows for one in window.latencies_s]


def window_lines(windows: Mapping[Writing, Sequence[Window]]) -> list[list[str]]:
    lines = [["written", "MiB/s", "reads", "p50 ms", "p95 ms", "p99 ms", "p50 ratio", "p95 ratio"]]
    for writing, those in windows.items():
        times = [1000 * one for one in latencies(those)]
        lines.append(
            [
                writing.value,
                f"{statistics.mean(one.written_mib_per_s for one in those):.0f}",
                f"{len(times)}",
                f"{quantile(times, 0.5):.1f}",
                f"{quantile(times, 0.95):.1f}",
                f"{quantile(times, 0.99):.1f}",
                f"{slower(windows, writing, 0.5):.2f}",
                f"{slower(windows, writing, 0.95):.2f}",
            ]
        )
    return lines
