"""``python -m eval.measure LOG``: measure a log, print the answer and the tables, write the figures as JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from eval.measure.answer import answer, tables, whose
from eval.measure.findings import Findings, findings
from eval.measure.options import Options, parse
from eval.measure.placements import outcomes
from eval.simulate.budgets import Budgets
from eval.simulate.cost_flag import flags
from eval.workloads.load import guess, read
from eval.workloads.save import saved
from eval.workloads.select import select
from eval.workloads.sessions import Session
from eval.workloads.shared_prefix import with_shared_prefix

FOUND, NOTHING, WRONG = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        kind = options.format or guess(options.log)
        results = list(outcomes(_sessions(options, kind), options.interval, options.costs.state_tokens))
        if not results:
            print(f"eval.measure: {options.log}: no request in it, or none selected", file=sys.stderr)
            return NOTHING
        found = findings(results, options.costs)
        seconds = whose(options.costs, options.model_sizes)
        print(answer(found, options.budgets, _simulate(options, kind), seconds))
        print()
        print(tables(found))
        if kind == "openai" and options.model == "demo":
            print(
                "\nThe demo tokenizer has one token a byte: lengths are 3 to 5 times those of a real model."
            )
        if options.json_file:
            _write(options, kind, found)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:  # TraceError and the others of the loaders are ValueErrors
        print(f"eval.measure: {error}", file=sys.stderr)
        return WRONG
    return FOUND


def _sessions(options: Options, kind: str) -> Iterable[Session]:
    sessions: Iterable[Session]
    sessions = select(read(options.log, kind, model=options.model), options.select, options.log)
    if options.shared_prefix:
        sessions = with_shared_prefix(sessions, options.shared_prefix)
    return saved(sessions, options.save_trace) if options.save_trace else sessions


def _simulate(options: Options, kind: str) -> str:
    """Return the command that simulates the same requests under the same budgets, with the same constants."""
    if options.save_trace:
        words = ["--workload", str(options.save_trace)]
    elif kind == "openai":  # the simulator has no tokenizer
        words = ["--workload", "FILE.jsonl"]
    else:
        words = ["--workload", str(options.log), "--format", kind]
        if options.select:
            words += ["--select", options.select]
        if options.shared_prefix:
            words += ["--shared-prefix", str(options.shared_prefix)]
    default = Budgets()
    for flag, size, usual in (
        ("--device", options.budgets.device_bytes, default.device_bytes),
        ("--cpu", options.budgets.host_bytes, default.host_bytes),
        ("--ssd", options.budgets.ssd_bytes, default.ssd_bytes),
    ):
        if size != usual:
            words += [flag, str(size)]
    words += flags(options.costs)
    command = f"python -m eval.simulate {shlex.join(words)} --out DIR"
    return f"{command}, FILE.jsonl from --save-trace" if "FILE.jsonl" in words else command


def _write(options: Options, kind: str, found: Findings) -> None:
    assert options.json_file is not None
    content: dict[str, Any] = {
        "log": str(options.log),
        "format": kind,
        "select": options.select,
        "shared_prefix": options.shared_prefix,
        "budgets": asdict(options.budgets),
        "costs": asdict(options.costs),
        **asdict(found),
    }
    options.json_file.parent.mkdir(parents=True, exist_ok=True)
    options.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
