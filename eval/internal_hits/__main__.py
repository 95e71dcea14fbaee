"""``python -m eval.internal_hits``: run the comparison, print it, write it as JSON."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eval.internal_hits import machine
from eval.internal_hits.budgets import difference
from eval.internal_hits.cases import CASES, Case
from eval.internal_hits.checks import Check, check_all, failed
from eval.internal_hits.client import AskFailed
from eval.internal_hits.options import CHUNK, Options, parse
from eval.internal_hits.records import Mismatch, Record, mismatches
from eval.internal_hits.runner import known_bytes, run_case, started
from eval.internal_hits.systems import HICACHE, HISTATE, HISTATE_NONE, NO_CACHE, STOCK, Running, Setup, shown
from eval.internal_hits.table import case_table, ratio_table
from eval.internal_hits.zero_reuse import Ratio, measure, ratios
from eval.servers import ServerFailed

_REFERENCE_ORDER = (NO_CACHE, STOCK, HICACHE, HISTATE_NONE, HISTATE)


@dataclass
class Results:
    """Grows as the run goes on; what is there when it is interrupted is written too."""

    records: list[Record] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    differences: list[Mismatch] = field(default_factory=list)
    intervals: dict[int, int] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    holdings: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    load_at_start: float = field(default_factory=machine.load)
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %Z"))

    def checks(self) -> list[Check]:
        return check_all(self.records, self.ratios, self.intervals)


def say(text: str) -> None:
    print(text, flush=True)


def run(options: Options, results: Results) -> None:
    """Run all chosen cases into `results`.

    Raises:
        ServerFailed, AskFailed, OSError: a server did not start, or a request failed.
    """
    options.work_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.work_dir / "disk", ignore_errors=True)
    setup = Setup(options.model, CHUNK, options.budgets, options.work_dir, extra=options.server_args)
    for default_chunk in (False, True):
        cases = [case for case in CASES if case.key in options.cases and case.default_chunk == default_chunk]
        this = replace(setup, chunk=None if default_chunk else CHUNK)
        for names in options.turns() if cases else ():
            with ExitStack() as stack:
                systems = []
                for name in names:
                    running = stack.enter_context(started(name, this, say))
                    note(running, results)
                    systems.append(running)
                    this, setup = known_bytes(this, running), known_bytes(setup, running)
                for case in cases:
                    run_one(systems, case, options, results)
                for running in systems:
                    results.counters[f"{running.name}, chunk size {this.chunk or 'default'}"] = (
                        running.counters()
                    )
    results.differences += mismatches(results.records, _REFERENCE_ORDER)
    half = {length: (count + 1) // 2 for length, count in options.pairs.items()}
    for name in options.compared:
        halves = []
        for order in ((HISTATE, name), (name, HISTATE)):
            with ExitStack() as stack:
                servers = {}
                for system in order:
                    running = servers[system] = stack.enter_context(started(system, setup, say))
                    setup = known_bytes(setup, running)
                    note(running, results)
                seed = f"{options.seed}/{order[0]} first"
                halves.append(measure(servers[HISTATE], servers[name], half, seed, say))
            records = [record for pairs in halves[-1].values() for pair in pairs for record in pair]
            results.records += records
            results.differences += mismatches(records, _REFERENCE_ORDER)
        results.ratios += ratios(halves, name)


def run_one(systems: list[Running], case: Case, options: Options, results: Results) -> None:
    """Run one case; for the random rewrites also find out which intervals HiState chose."""
    ours = next((running for running in systems if running.name == HISTATE), None)
    before = ours.counters()["intervals_chosen_total"] if ours else {}
    results.records += run_case(systems, case, options.scale, options.seed, say)
    if ours and case.key == "d":
        results.intervals = _new_counts(before, ours.counters()["intervals_chosen_total"])


def note(running: Running, results: Results) -> None:
    """Keep a server's command line and real bytes, and warn where they differ from HiState's."""
    chunk = running.setup.chunk or "default"
    results.commands[f"{running.name}, chunk size {chunk}"] = shown(running.name, running.setup)
    if running.holdings is None:
        return
    results.holdings[f"{running.name}, chunk size {chunk}"] = asdict(running.holdings)
    reference = running.setup.reference
    if reference is not None and (unequal := difference(reference, running.holdings)):
        results.warnings.append(f"{running.name} holds other bytes than HiState, {unequal}")
        say(f"warning: {results.warnings[-1]}")


def _new_counts(before: dict[str, int], after: dict[str, int]) -> dict[int, int]:
    """Return which interior intervals were chosen how often in between; 0 is "none", the short rewrites themselves."""
    grown = {int(key): count - before.get(key, 0) for key, count in after.items()}
    return {interval: count for interval, count in grown.items() if interval and count}


def report(options: Options, results: Results) -> str:
    """Return the table, the checks, and every mismatch."""
    parts = [case_table(results.records), ratio_table(results.ratios)]
    if results.intervals:
        chosen = ", ".join(
            f"{interval} ({count} times)" for interval, count in sorted(results.intervals.items())
        )
        parts.append(f"Intervals chosen in case d: {chosen}")
    parts.append("\n".join(check.text() for check in results.checks()))
    parts.append("\n".join(f"warning: {warning}" for warning in results.warnings))
    if results.differences:
        parts.append("\n".join(f"ERROR: {mismatch.text()}" for mismatch in results.differences))
    elif len({record.system for record in results.records}) > 1:
        parts.append(f"Greedy tokens are equal across systems in all {len(results.records)} answers.")
    return "\n\n".join(part for part in parts if part)


def write_json(options: Options, results: Results, complete: bool) -> None:
    summary = {
        "complete": complete,
        "started_at": results.started_at,
        "machine": machine.describe(),
        "load": {"start": results.load_at_start, "end": machine.load()},
        "config": {
            "cases": options.cases,
            "systems": options.systems,
            "scale": asdict(options.scale),
            "pairs": options.pairs,
            "budgets": asdict(options.budgets),
            "model": options.model or "demo",
            "seed": options.seed,
        },
        "commands": results.commands,
        "bytes_held": results.holdings,
        "counters": results.counters,
        "intervals_case_d": results.intervals,
        "checks": [asdict(check) for check in results.checks()],
        "warnings": results.warnings,
        "mismatches": [asdict(mismatch) for mismatch in results.differences],
        "zero_reuse": [ratio.as_json() for ratio in results.ratios],
        "requests": [record.as_json() for record in results.records],
    }
    options.json_path.parent.mkdir(parents=True, exist_ok=True)
    options.json_path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    say(f"\nEvery request, command line and counter: {options.json_path}")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # A terminated run stops its servers as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(options.plan())
    results = Results()
    say(f"On {machine.text(machine.describe())}; load {results.load_at_start}\n")
    code = 2
    try:
        run(options, results)
        code = 1 if results.differences or failed(results.checks()) else 0
    except KeyboardInterrupt:
        print("interrupted: the servers are stopped, what was measured so far follows", file=sys.stderr)
        code = 130
    except (ServerFailed, AskFailed, OSError, http.client.HTTPException) as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        shutil.rmtree(options.work_dir / "disk", ignore_errors=True)
    say(f"\n{report(options, results)}")
    for name, command in results.commands.items():
        say(f"{name}: {command}")
    write_json(options, results, complete=code in (0, 1))
    return code


if __name__ == "__main__":
    sys.exit(main())
