"""``python -m eval.metrics_overhead``: what metrics and explanations cost a request that the cache cannot help.

One server of the demo model gets prompts, one at a time, that share nothing. Each answer is one token, so its time is the
time to first token. Between two prompts the scheduler's metrics and explanations are turned off or on (`eval/switch`): of
each two neighbours one is computed with both and one without, in turn first and second. The result is the median of the
ratios of neighbours, with a 95% interval from resampling. Two servers, one with and one without, cannot be compared so
closely: of two equal ones the one that was started second was up to a fifth faster.

SGLang's own metrics are on throughout. With both a request is to take at most 1.02 times what it takes without; exit
status 1 if the median is more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from eval.arguments import positive, with_examples
from eval.internal_hits.machine import describe, text
from eval.progress import each
from eval.quantile import quantile
from eval.servers import Server

TARGET = 1.02
RESAMPLES = 2000
SWITCH = Path(__file__).with_name("switch")
SETTLE_S = 0.02
"""Time that an idle scheduler gets to wake up for the signal."""
SIZES = (
    "--histate-ssd-size", "256MiB", "--histate-inflight-size", "32MiB", "--histate-ssd-write-rate", "unlimited",
    "--hicache-ratio", "2", "--max-total-tokens", "32768", "--max-mamba-cache-size", "48",
)  # fmt: skip


@dataclass(frozen=True)
class Overhead:
    """`ratio` is the median of a time with metrics over its neighbour's without; `low` and `high` its 95% interval."""

    pairs: int
    with_s: float
    without_s: float
    ratio: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        return self.ratio <= TARGET


def overhead(with_s: Sequence[float], without_s: Sequence[float], seed: int = 0) -> Overhead:
    """Compare times of neighbours, in seconds and in the same order.

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


class Switched:
    """A server whose scheduler is asked with metrics and explanations or without. Use as a context manager."""

    def __init__(self, work: Path) -> None:
        folder = work / "ssd"
        shutil.rmtree(folder, ignore_errors=True)
        paths = [str(SWITCH), os.environ.get("PYTHONPATH", "")]
        environ = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        arguments = ["--demo", "--histate-ssd-dir", str(folder.resolve()), *SIZES]
        self._server = Server(arguments, work / "server.log", environ)
        self._on = True

    def __enter__(self) -> Switched:
        self._server.__enter__()
        self._server.wait_ready()
        self._scheduler = int(self._server.status()["pid"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def turn(self, on: bool) -> None:
        if on is not self._on:
            os.kill(self._scheduler, signal.SIGUSR2)
            self._on = on
            time.sleep(SETTLE_S)

    def ask(self, prompt: list[int], rid: str | None = None) -> float:
        """Return the seconds until the answer to a prompt that is not in the cache."""
        start_s = time.perf_counter()
        answer = self._server.generate(prompt, 1, **({} if rid is None else {"rid": rid}))
        passed_s = time.perf_counter() - start_s
        assert answer["meta_info"]["cached_tokens"] == 0, "a prompt that nobody sent before was in the cache"
        return passed_s

    def explains(self, rid: str) -> bool:
        """Whether the scheduler has anything to say of a request."""
        try:
            self._server.get(f"/histate/explain?rid={rid}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True


def check_switch(server: Switched, tokens: int) -> None:
    """Assert that what is measured is really turned off and on."""
    for number, on in enumerate((True, False, True, False)):
        server.turn(on)
        server.ask(prompts(1, tokens, 1000 + number)[0], rid=f"check-{number}")
    server.turn(True)
    found = [server.explains(f"check-{number}") for number in range(4)]
    assert found == [True, False, True, False], f"the switch does not switch: {found}"


def measure(server: Switched, pairs: int, tokens: int, seed: int) -> tuple[list[float], list[float]]:
    """Return the seconds with metrics and without, of `pairs` neighbours."""
    for prompt in prompts(8, tokens, seed + 1):
        server.ask(prompt)
    times: tuple[list[float], list[float]] = ([], [])
    sent = iter(prompts(2 * pairs, tokens, seed))
    for number in each(range(pairs), "prompts", "pair"):
        for without in (0, 1) if number % 2 == 0 else (1, 0):
            server.turn(not without)
            times[without].append(server.ask(next(sent)))
    return times


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.metrics_overhead", description=__doc__.partition("\n\n")[2]
    )
    with_examples(parser, "python -m eval.metrics_overhead", "python -m eval.metrics_overhead --pairs 50")
    parser.add_argument("--pairs", type=positive, default=400, help="of prompts (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=1024, help="of each prompt (%(default)s)")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/metrics_overhead"),
        help="log, SSD and summary.json (%(default)s)",
    )
    given = parser.parse_args(argv)
    given.work_dir.mkdir(parents=True, exist_ok=True)
    with Switched(given.work_dir) as server:
        check_switch(server, given.tokens)
        found = overhead(*measure(server, given.pairs, given.tokens, seed=0))
    facts = describe()
    print(f"\n{text(facts)}")
    print(f"{found.pairs} pairs of prompts of {given.tokens} tokens, time to first token in ms, median")
    print(f"with metrics and explanations {found.with_s * 1000:.2f}, without {found.without_s * 1000:.2f}")
    print(f"ratio {found.ratio:.4f} (95% interval {found.low:.4f} to {found.high:.4f}), target {TARGET}")
    summary = {"machine": facts, "tokens": given.tokens, **asdict(found)}
    (given.work_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("met" if found.met else "MISSED")
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
