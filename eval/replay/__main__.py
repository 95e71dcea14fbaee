"""``python -m eval.replay``: run, print the table, write the summary."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.internal_hits.client import AskFailed
from eval.metrics import compare, load, summary
from eval.replay.options import Options, parse
from eval.replay.outcome import outcome
from eval.replay.probe import Unusable
from eval.replay.rounds import prepare, run_all
from eval.replay.sending import ServerGone
from eval.replay.systems import SYSTEMS
from eval.servers import ServerFailed


def say(text: str) -> None:
    print(text, flush=True)


def replay(options: Options, command: str) -> list[Path]:
    """Run everything; errors as in `prepare` and `run_all`."""
    workload = prepare(options)
    say(workload.text())
    if options.url is None:
        for name in options.systems:
            say(f"  {name}: {SYSTEMS[name].description}")
    return run_all(options, workload, command, say)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    options = parse(given)
    # A terminated run stops its servers as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        paths = replay(options, f"python -m eval.replay {shlex.join(given)}")
        runs = load(paths)
        say("\n" + outcome(compare(runs)))
        written = options.out / "summary.json"
        written.write_text(json.dumps(summary(runs), indent=1) + "\n", encoding="utf-8")
        say(f"\nEvery request: {', '.join(str(path) for path in paths)}; summary: {written}")
    except KeyboardInterrupt:
        print("interrupted: servers are stopped; --resume goes on", file=sys.stderr)
        return 130
    except (
        ServerFailed,
        Unusable,
        AskFailed,
        ServerGone,
        ValueError,
        OSError,
    ) as error:
        print(f"eval.replay: {error}", file=sys.stderr)
        return 2
    return 1 if any(record.error for run in runs for record in run.records) else 0


if __name__ == "__main__":
    sys.exit(main())
