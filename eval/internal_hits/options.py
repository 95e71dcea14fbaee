"""The command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eval.arguments import positive, size_bytes, with_examples
from eval.internal_hits.budgets import Budgets
from eval.internal_hits.cases import CASES, LONG, ZERO_REUSE, ZERO_REUSE_TITLE, Scale
from eval.internal_hits.systems import DESCRIPTIONS, HICACHE, HISTATE, HISTATE_NONE, NO_CACHE, STOCK
from sglang_histate.sizes import format_size

DEFAULT_DIR = Path("build/internal_hits")
CHUNK = 8192
_START_S = 45.0
_TOKENS_PER_S = 6000.0


@dataclass(frozen=True)
class Options:
    """What to run. `pairs`: how many zero-reuse pairs by prompt length."""

    cases: tuple[str, ...]
    systems: tuple[str, ...]
    scale: Scale
    pairs: dict[int, int]
    budgets: Budgets
    model: str | None
    seed: int
    work_dir: Path
    json_path: Path
    server_args: tuple[str, ...]
    together: bool = False

    @property
    def plain_systems(self) -> tuple[str, ...]:
        """Systems that the cases other than zero reuse are sent to, HiState first: its bytes size HiCache's."""
        return tuple(name for name in (HISTATE, HICACHE, NO_CACHE) if name in self.systems)

    def turns(self) -> tuple[tuple[str, ...], ...]:
        """Return which systems are up at once, group after group."""
        return (self.plain_systems,) if self.together else tuple((name,) for name in self.plain_systems)

    @property
    def compared(self) -> tuple[str, ...]:
        """Systems that HiState is measured against where nothing can be reused."""
        others = (STOCK, NO_CACHE, HISTATE_NONE, HICACHE)
        return tuple(name for name in others if name in self.systems) if self.with_zero_reuse else ()

    @property
    def with_zero_reuse(self) -> bool:
        return ZERO_REUSE in self.cases and HISTATE in self.systems

    def plan(self) -> str:
        """Say what will be done and about how long it takes."""
        budgets, scale = self.budgets, self.scale
        lines = [
            f"Model: {self.model or 'the demo model'}. Budgets of every system: {budgets.device_kv_tokens} tokens of KV "
            f"and {budgets.device_states} states on the device, host pools {budgets.host_ratio:g} times the device's "
            f"plus {format_size(budgets.inflight_bytes)}, {format_size(budgets.disk_bytes)} of disk.",
            *(f"  {name}: {DESCRIPTIONS[name]}" for name in self.systems),
            f"Systems are up {'at once and asked in turn' if self.together else 'one after the other'}.",
        ]
        for case in CASES:
            if case.key in self.cases:
                times = (
                    f"{scale.points} points"
                    if case.key == "d"
                    else f"{1 if case.once else scale.repeats} times"
                )
                lines.append(f"  case {case.key}: {case.title}, {times}")
        if self.with_zero_reuse:
            pairs = ", ".join(f"{count} pairs of {length} tokens" for length, count in self.pairs.items())
            lines.append(
                f"  case {ZERO_REUSE}: {ZERO_REUSE_TITLE}, {pairs}, against {', '.join(self.compared)}"
            )
        starts, tokens = self.work()
        minutes = (starts * _START_S + tokens / _TOKENS_PER_S) / 60
        lines.append(
            f"{starts} server starts and about {tokens:,} tokens: about {minutes:.0f} minutes on two idle cores, more on "
            "a busy machine, less on a GPU."
        )
        return "\n".join(lines)

    def work(self) -> tuple[int, int]:
        """Return how many servers are started and about how many prompt tokens are sent."""
        scale = self.scale
        flood = scale.device_kv_tokens // LONG + 1
        per_case = {
            "a": 3,
            "b": 2,
            "c": 4,
            "d": 2 * scale.points,
            "e": flood + 2,
            "f": 4,
            "h": scale.host_kv_tokens // LONG + 3,
        }
        chosen = [case for case in CASES if case.key in self.cases]
        prompts = sum(per_case[c.key] * (1 if c.once else scale.repeats) for c in chosen)
        starts = len({c.default_chunk for c in chosen}) * len(self.plain_systems)
        tokens = prompts * LONG * len(self.plain_systems)
        if self.with_zero_reuse:
            starts += 4 * len(self.compared)  # both, in either order
            tokens += 2 * len(self.compared) * sum(length * count for length, count in self.pairs.items())
        return starts, tokens


def parse(argv: list[str] | None = None) -> Options:
    keys = [*(case.key for case in CASES), ZERO_REUSE]
    parser = argparse.ArgumentParser(
        prog="python -m eval.internal_hits",
        description="Starts HiState, stock HiCache and a server without cache, with the same bytes on device, host and "
        "disk, sends each the same prompts, and prints cached tokens by tier and time to first token.",
        epilog="Cases: "
        + "; ".join([*(f"{case.key} {case.title}" for case in CASES), f"{ZERO_REUSE} {ZERO_REUSE_TITLE}"])
        + ". Systems: "
        + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
        + ". Exit code: 0 all well, 1 different greedy tokens or a check that is not met, 2 a server or the command line "
        "failed, 130 interrupted.",
    )
    with_examples(
        parser,
        "python -m eval.internal_hits --together",
        "python -m eval.internal_hits --cases a,b --systems histate,hicache",
    )
    parser.add_argument("--cases", default=",".join(keys), help="comma-separated, default all: %(default)s")
    parser.add_argument(
        "--systems", default=",".join(DESCRIPTIONS), help="comma-separated, default all: %(default)s"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, 4 rewrite points, 4 zero-reuse pairs"
    )
    parser.add_argument(
        "--repeats", type=positive, help="repeats of cases a, b, c, e, f with new prompts (3)"
    )
    parser.add_argument("--points", type=positive, help="rewrite points of case d (10)")
    parser.add_argument(
        "--pairs",
        type=positive,
        help="zero-reuse pairs of each length (24), half of them with either server started first",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all prompts and points (%(default)s)")
    parser.add_argument(
        "--together",
        action="store_true",
        help="have the systems up at once and ask them in turn, instead of one after the other: needs their memory "
        "together (2.5 GB each for the demo model), but times stay comparable on a busy machine",
    )
    parser.add_argument("--model", metavar="PATH", help="a hybrid model instead of the demo model")
    parser.add_argument(
        "--device-kv-tokens", type=positive, default=32768, metavar="N", help="device KV pool (%(default)s)"
    )
    parser.add_argument(
        "--device-states", type=positive, default=48, metavar="N", help="device state slots (%(default)s)"
    )
    parser.add_argument(
        "--host-ratio", type=float, default=2.0, help="HiState's host pools to device pools (%(default)s)"
    )
    parser.add_argument(
        "--inflight-size", type=size_bytes, default="16MiB", help="HiState's in-flight records (%(default)s)"
    )
    parser.add_argument(
        "--disk-size", type=size_bytes, default="64MiB", help="disk tier of each system (%(default)s)"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=DEFAULT_DIR, help="logs and disk tiers (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="where the figures go (summary.json in the work directory)")
    parser.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="last: SGLang flags for every server"
    )
    given = parser.parse_args(argv)
    cases = _subset(parser, "--cases", given.cases, keys)
    systems = _subset(parser, "--systems", given.systems, list(DESCRIPTIONS))
    if given.device_kv_tokens < 2 * LONG:
        parser.error(
            f"--device-kv-tokens {given.device_kv_tokens} is too small: the prompts need at least {2 * LONG}"
        )
    if ZERO_REUSE in cases and HISTATE not in systems:
        parser.error(f"--cases {ZERO_REUSE} compares others with {HISTATE}: add it to --systems")
    quick = given.quick
    # HiCache's host pool is larger than HiState's by what HiState keeps for records in flight.
    host_kv_tokens = round(given.device_kv_tokens * (given.host_ratio + 1))
    scale = Scale(
        given.device_kv_tokens,
        host_kv_tokens,
        given.repeats or (1 if quick else 3),
        given.points or (4 if quick else 10),
    )
    count = given.pairs or (4 if quick else 24)
    return Options(
        cases=cases,
        systems=systems,
        scale=scale,
        pairs={2048: count, 8192: count},
        budgets=Budgets(
            given.device_kv_tokens,
            given.device_states,
            given.host_ratio,
            given.inflight_size,
            given.disk_size,
        ),
        model=given.model,
        seed=given.seed,
        work_dir=given.work_dir,
        json_path=given.json or given.work_dir / "summary.json",
        server_args=tuple(given.server_args),
        together=given.together,
    )


def _subset(parser: argparse.ArgumentParser, flag: str, text: str, allowed: list[str]) -> tuple[str, ...]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in allowed]
    if unknown or not chosen:
        parser.error(f"{flag}: {unknown[0] if unknown else 'nothing'} is not one of {', '.join(allowed)}")
    return tuple(name for name in allowed if name in chosen)
