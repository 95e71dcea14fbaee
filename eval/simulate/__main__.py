"""``python -m eval.simulate``: simulate systems side by side, write their records, print a table."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from eval.metrics import compare, load, text_table
from eval.progress import each
from eval.simulate.engine import DoesNotFit
from eval.simulate.options import Options, parse
from eval.simulate.run import Done, simulate
from eval.workloads.sessions import Session


def say(text: str) -> None:
    print(text, flush=True)


def path_of(options: Options, system: str) -> Path:
    return options.out / f"{system}.jsonl"


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        sessions = options.workload.sessions()
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"eval.simulate: {error}", file=sys.stderr)
        return 2
    requests = sum(session.requests for session in sessions)
    say(f"{options.setting.workload}: {requests} requests of {len(sessions)} sessions")
    failed, wrong = _run_all(options, sessions)
    good = [system for system in options.systems if system not in failed]
    if good:
        runs = load(path_of(options, system) for system in good)
        say("\n" + text_table(compare(runs)))
    return (2 if wrong else 1) if failed else 0


def _run_all(options: Options, sessions: Sequence[Session]) -> tuple[set[str], bool]:
    """Run every system; return those that failed, and whether one did because of its input."""
    failed: set[str] = set()
    wrong = False
    # Forked processes share the sessions, which take longer to read than some systems take to run.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork"), _adopt, (sessions,)) as pool:
        waiting = {pool.submit(_one, options, system): system for system in options.systems}
        for future in each(as_completed(waiting), "simulate", "system", len(waiting)):
            system = waiting[future]
            try:
                done = future.result()
                say(f"{system}: {done.requests} requests in {done.wall_s:.1f} s -> {done.path}")
            except (DoesNotFit, ValueError, OSError, AssertionError, BrokenProcessPool) as error:
                failed.add(system)
                wrong = wrong or isinstance(error, ValueError)
                print(f"eval.simulate: {system}: {error or type(error).__name__}", file=sys.stderr)
    return failed, wrong


_sessions: Sequence[Session] = ()


def _adopt(sessions: Sequence[Session]) -> None:
    global _sessions
    _sessions = sessions


def _one(options: Options, system: str) -> Done:
    return simulate(system, _sessions, options.setting, path_of(options, system))


if __name__ == "__main__":
    sys.exit(main())
