"""``python -m eval.metrics_overhead``: what metrics and explanations cost a request that the cache cannot help.

Two servers of the demo model, one as it is and one with --no-histate-metrics and --histate-explain-requests 0, run side by
side and get the same prompts, one at a time and by turns; no prompt shares anything with another. Each answer is one token,
so its time is the time to first token. Of each prompt the ratio of the two times is taken: what disturbs the machine
disturbs both. The result is the median ratio over all rounds, with a 95% interval from resampling; a server is started anew
in each round, because one process can be faster than its twin.

With both a request is to take at most 1.02 times what it takes without; exit status 1 if the median is more.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.arguments import positive, with_examples
from eval.internal_hits.machine import describe, text
from eval.quantile import quantile
from eval.servers import Server

TARGET = 1.02
WITHOUT = ("--no-histate-metrics", "--histate-explain-requests", "0")
RESAMPLES = 2000
SIZES = (
    "--histate-ssd-size", "256MiB", "--histate-inflight-size", "32MiB", "--histate-ssd-write-rate", "unlimited",
    "--hicache-ratio", "2", "--max-total-tokens", "32768", "--max-mamba-cache-size", "48",
)  # fmt: skip


@dataclass(frozen=True)
class Overhead:
    """`ratio` is the median of each prompt's time with metrics over its time without; `low` and `high` its 95% interval."""

    prompts: int
    with_s: float
    without_s: float
    ratio: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        return self.ratio <= TARGET


def overhead(with_s: Sequence[float], without_s: Sequence[float], seed: int = 0) -> Overhead:
    """Compare the times of the same prompts on both servers, in seconds and in the same order.

    Raises:
        ValueError: not as many of one as of the other, or none.
    """
    if len(with_s) != len(without_s) or not with_s:
        raise ValueError(f"{len(with_s)} times with metrics and {len(without_s)} without cannot be compared")
    ratios = [one / other for one, other in zip(with_s, without_s, strict=True)]
    draw = random.Random(seed)
    medians = [quantile(draw.choices(ratios, k=len(ratios)), 0.5) for _ in range(RESAMPLES)]
    return Overhead(
        len(ratios),
        quantile(with_s, 0.5),
        quantile(without_s, 0.5),
        quantile(ratios, 0.5),
        quantile(medians, 0.025),
        quantile(medians, 0.975),
    )


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of printable byte tokens whose first tokens differ already."""
    draw = random.Random(seed)
    return [[draw.randrange(32, 256) for _ in range(tokens)] for _ in range(count)]


def measure(work: Path, count: int, tokens: int, seed: int) -> tuple[list[float], list[float]]:
    """Start both servers, send each prompt to both, and return the seconds with metrics and without.

    Raises:
        ServerFailed: one did not start.
    """
    with ExitStack() as stack:
        servers = [_start(work, "with", (), stack), _start(work, "without", WITHOUT, stack)]
        if seed % 2:  # which of them started first must not tell
            servers.reverse()
        for prompt in prompts(8, tokens, seed + 1):
            for server in servers:
                _ask(server, prompt)
        times: list[list[float]] = [[], []]
        for number, prompt in enumerate(prompts(count, tokens, seed)):
            for at in (0, 1) if number % 2 == 0 else (1, 0):
                times[at].append(_ask(servers[at], prompt))
        if seed % 2:
            times.reverse()
        return times[0], times[1]


def _start(work: Path, name: str, extra: tuple[str, ...], stack: ExitStack) -> Server:
    folder = work / f"{name}-ssd"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["--demo", "--histate-ssd-dir", str(folder.resolve()), *SIZES, *extra]
    server = Server(arguments, work / f"{name}.log", {"OMP_WAIT_POLICY": "PASSIVE"})
    return stack.enter_context(server).wait_ready()


def _ask(server: Server, prompt: list[int]) -> float:
    start_s = time.perf_counter()
    answer = server.generate(prompt, 1)
    passed_s = time.perf_counter() - start_s
    assert answer["meta_info"]["cached_tokens"] == 0, (
        "a prompt that nobody sent before was found in the cache"
    )
    return passed_s


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.metrics_overhead", description=__doc__.partition("\n\n")[2]
    )
    with_examples(parser, "python -m eval.metrics_overhead", "python -m eval.metrics_overhead --rounds 1")
    parser.add_argument("--prompts", type=positive, default=150, help="of each round (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=1024, help="of each prompt (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=4, help="starts of both servers (%(default)s)")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/metrics_overhead"),
        help="logs, SSDs and summary.json (%(default)s)",
    )
    given = parser.parse_args(argv)
    given.work_dir.mkdir(parents=True, exist_ok=True)
    with_s: list[float] = []
    without_s: list[float] = []
    for number in range(given.rounds):
        one, other = measure(given.work_dir, given.prompts, given.tokens, seed=number * 1001)
        with_s += one
        without_s += other
        print(
            f"round {number + 1} of {given.rounds}: median ratio {overhead(one, other).ratio:.4f}", flush=True
        )
    found = overhead(with_s, without_s)
    facts = describe()
    print(f"\n{text(facts)}")
    print(f"{found.prompts} prompts of {given.tokens} tokens, time to first token in ms, median")
    print(f"with metrics and explanations {found.with_s * 1000:.2f}, without {found.without_s * 1000:.2f}")
    print(f"ratio {found.ratio:.4f} (95% interval {found.low:.4f} to {found.high:.4f}), target {TARGET}")
    summary = {"machine": facts, "tokens": given.tokens, "rounds": given.rounds, **asdict(found)}
    (given.work_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("met" if found.met else "MISSED")
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
