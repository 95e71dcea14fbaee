"""``python -m eval.eviction``: run the comparison, print it, write it as JSON."""

from __future__ import annotations

import http.client
import sys
from dataclasses import asdict
from itertools import islice
from typing import Any

from eval.eviction.budgets import DEMO_UNITS
from eval.eviction.dry import simulate
from eval.eviction.options import BIG_FILE, SAMPLES, Options, parse
from eval.eviction.requests import Request, choose, requests_of, working_set
from eval.eviction.rows import Row, table
from eval.eviction.served import Run, different_outputs, serve, write_json
from eval.internal_hits import machine
from eval.internal_hits.client import AskFailed
from eval.servers import ServerFailed
from eval.workloads.fields import TraceError
from eval.workloads.weka import read_sessions


def say(text: str) -> None:
    print(text, flush=True)


def load(options: Options) -> list[Request]:
    """Return the requests; errors as in `read_sessions` and `requests_of`."""
    few = choose(read_sessions(options.traces / SAMPLES), 1000, options.context_tokens, options.turns)
    names = {session.name for session in few}
    big = islice(read_sessions(options.traces / BIG_FILE), options.skip, None)
    others = (session for session in big if session.name not in names)
    more = choose(others, options.sessions, options.context_tokens, options.turns)
    return requests_of(
        [*few, *more],
        live=options.live,
        longest_gap_s=options.longest_gap_s,
        tokens_per_block=options.tokens_per_block,
        most_output=options.most_output,
    )


def describe(options: Options, requests: list[Request]) -> str:
    budgets = options.budgets
    host = (budgets.host_bytes - budgets.inflight_bytes) // DEMO_UNITS.kv_token
    prompt, reusable = sum(len(r.tokens) for r in requests), sum(r.reusable for r in requests)
    return (
        f"{len(requests)} requests of {len({r.session for r in requests})} sessions, {options.live} at a time: {prompt} "
        f"prompt tokens, {reusable} of them reusable ({100 * reusable / prompt:.1f} %), {working_set(requests)} different.\n"
        f"Device: {budgets.device_kv_tokens} tokens of KV, {budgets.device_states} states. Host: {host} tokens of KV. "
        f"SSD: {budgets.ssd_bytes // DEMO_UNITS.slab - 1} checkpoints, each as large as the KV of "
        f"{DEMO_UNITS.checkpoint / DEMO_UNITS.kv_token:.0f} tokens."
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        requests = load(options)
    except (TraceError, ValueError, OSError) as error:
        print(f"eval.eviction: {error}", file=sys.stderr)
        return 2
    say(describe(options, requests))
    facts: dict[str, Any] = {
        "machine": machine.describe(),
        "budgets": asdict(options.budgets),
        "dry": options.dry,
    }
    facts["load_at_start"] = machine.load()
    rows: list[Row] = []
    runs: list[Run] = []
    code = 0
    try:
        for mode in options.modes:
            if options.dry:
                rows.append(simulate(requests, mode, options.budgets, DEMO_UNITS))
                continue
            run = serve(requests, mode, options.budgets, options.work_dir, options.server_args, say)
            runs.append(run)
            rows.append(run.row)
            say(table([run.row]))
    except (ServerFailed, AskFailed, ValueError, OSError, http.client.HTTPException) as error:
        print(f"eval.eviction: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    differences = different_outputs(runs)
    say("\n" + table(rows))
    for difference in differences:
        say(difference)
    results = [run.as_json() for run in runs] if runs else [{"row": row.as_json()} for row in rows]
    write_json(options.json_path, {**facts, "runs": results, "differences": differences})
    return code or (1 if differences else 0)


if __name__ == "__main__":
    sys.exit(main())
