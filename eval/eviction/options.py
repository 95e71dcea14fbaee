"""The command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import positive, size_bytes, with_examples
from eval.eviction.budgets import DEMO_UNITS, Budgets
from eval.eviction.requests import PAGE
from eval.eviction.rows import Mode
from sglang_histate.policy.score import DEFAULT_TAU, Eviction

TRACES = Path("../shared/traces")
SAMPLES, BIG_FILE = Path("weka_cc/samples"), Path("weka_cc/weka_cc_710.jsonl.xz")
DEFAULT_DIR = Path("build/eviction")


@dataclass(frozen=True)
class Options:
    """What to compare, on which requests."""

    traces: Path
    modes: tuple[Mode, ...]
    budgets: Budgets
    dry: bool
    sessions: int
    skip: int
    live: int
    longest_gap_s: float
    context_tokens: int
    turns: int
    tokens_per_block: int
    most_output: int
    work_dir: Path
    json_path: Path
    server_args: tuple[str, ...]


def parse(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m eval.eviction",
        description="Sends the same recorded agent sessions to a server once per ranking, with the same bytes on device, "
        "host and SSD, all of them too small, and prints what was computed again. Prompts are recorded sessions, "
        "scaled; each answer is replaced by the recorded one in later prompts.",
        epilog="Exit code: 0 all well, 1 different greedy tokens, 2 a server, the traces or the command line failed.",
    )
    with_examples(
        parser,
        "python -m eval.eviction --dry",
        "python -m eval.eviction --modes lru,score --traces ../shared/traces",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help=f"folder with {SAMPLES} and {BIG_FILE} (../shared/traces beside the repository)",
    )
    parser.add_argument("--dry", action="store_true", help="simulate instead of starting servers: seconds")
    parser.add_argument(
        "--modes",
        default="score,lru,lru-refresh",
        help=f"comma-separated, of {', '.join(Eviction)} (%(default)s); score and loss are run at each tau",
    )
    parser.add_argument("--taus", default=f"{DEFAULT_TAU:g}", help="comma-separated (%(default)s)")
    sessions = parser.add_argument_group("requests")
    sessions.add_argument("--sessions", type=positive, default=24, help="from the big file (%(default)s)")
    sessions.add_argument("--skip", type=int, default=0, help="sessions of the big file to pass over (0)")
    sessions.add_argument("--live", type=positive, default=12, help="sessions at a time (%(default)s)")
    sessions.add_argument(
        "--longest-gap", type=float, default=60.0, metavar="S", help="pauses are cut to it (%(default)s)"
    )
    sessions.add_argument(
        "--context",
        type=positive,
        default=65536,
        help="a session ends where it exceeds it (%(default)s tokens)",
    )
    sessions.add_argument("--turns", type=positive, default=25, help="most of a session (%(default)s)")
    sessions.add_argument(
        "--tokens-per-block",
        type=positive,
        default=4,
        metavar="N",
        help="of 64 recorded tokens (%(default)s)",
    )
    sessions.add_argument(
        "--most-output",
        type=positive,
        default=1,
        metavar="N",
        help="most tokens of an answer (%(default)s); no later prompt has them, so that with more of them one answer in "
        "64 / N leaves a page that is never used again",
    )
    sizes = parser.add_argument_group("budgets, the same for all")
    sizes.add_argument("--device-kv-tokens", type=positive, default=8192, metavar="N", help="(%(default)s)")
    sizes.add_argument("--device-states", type=positive, default=24, metavar="N", help="(%(default)s)")
    sizes.add_argument(
        "--static-split", action="store_true", help="two shares of the device instead of one pool of bytes"
    )
    sizes.add_argument(
        "--host-kv-tokens",
        type=positive,
        default=32768,
        metavar="N",
        help="host memory as tokens of KV; what is in flight comes on top (%(default)s)",
    )
    sizes.add_argument(
        "--inflight-size", type=size_bytes, default="2MiB", help="at most the SSD's size (%(default)s)"
    )
    sizes.add_argument(
        "--ssd-states", type=positive, default=32, metavar="N", help="checkpoints (%(default)s)"
    )
    parser.add_argument("--work-dir", type=Path, default=DEFAULT_DIR, help="logs and SSDs (%(default)s)")
    parser.add_argument("--json", type=Path, help="where the figures go (summary.json in the work directory)")
    parser.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="last: more flags for every server"
    )
    given = parser.parse_args(argv)
    if PAGE % given.tokens_per_block:
        parser.error(f"--tokens-per-block {given.tokens_per_block} does not divide the page of {PAGE} tokens")
    largest = given.context * given.tokens_per_block // 64 + given.most_output + PAGE
    if given.device_kv_tokens < largest:
        parser.error(
            f"--device-kv-tokens {given.device_kv_tokens} is too small for prompts of up to {largest} tokens"
        )
    kv, slab = DEMO_UNITS.kv_token, DEMO_UNITS.slab
    return Options(
        traces=_traces(parser, given.traces),
        modes=_modes(parser, given.modes, given.taus),
        budgets=Budgets(
            given.device_kv_tokens,
            given.device_states,
            given.host_kv_tokens * kv + given.inflight_size,
            given.inflight_size,
            (given.ssd_states + 1) * slab,  # one for the file's header
            one_device_pool=not given.static_split,
        ),
        dry=given.dry,
        sessions=given.sessions,
        skip=given.skip,
        live=given.live,
        longest_gap_s=given.longest_gap,
        context_tokens=given.context,
        turns=given.turns,
        tokens_per_block=given.tokens_per_block,
        most_output=given.most_output,
        work_dir=given.work_dir,
        json_path=given.json or given.work_dir / ("dry.json" if given.dry else "summary.json"),
        server_args=tuple(given.server_args),
    )


def _traces(parser: argparse.ArgumentParser, given: Path | None) -> Path:
    found = given or Path(__file__).parents[2] / TRACES
    for part in (SAMPLES, BIG_FILE):
        if not (found / part).exists():
            parser.error(
                f"there is no {part} in {found}: give --traces the folder with the recorded sessions"
                if given
                else f"give --traces the folder with the recorded sessions, {SAMPLES} and {BIG_FILE}"
            )
    return found


def _modes(parser: argparse.ArgumentParser, modes: str, taus: str) -> tuple[Mode, ...]:
    chosen: list[Mode] = []
    try:
        values = [float(text) for text in taus.split(",")]
        for text in modes.split(","):
            eviction = Eviction(text.strip())
            chosen += [Mode(eviction, tau) for tau in (values if eviction.priced else values[:1])]
    except ValueError as error:
        parser.error(f"--modes {modes} --taus {taus}: {error}")
    if any(not 0 <= tau < float("inf") for tau in values):
        parser.error(f"--taus {taus}: numbers of requests, not negative, are expected")
    return tuple(chosen)
