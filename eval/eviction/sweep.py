"""``python -m eval.eviction.sweep``: which tau is good, simulated over many workloads and budgets.

Every cell of the table is what `score` computes again over what `lru` does, on one set of sessions with one number of
live ones and one pair of budgets; the last lines are means over all cells. Takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import geometric_mean

from eval.eviction.budgets import DEMO_UNITS, Budgets
from eval.eviction.dry import simulate
from eval.eviction.options import BIG_FILE, Options, parse
from eval.eviction.requests import Request, choose, requests_of
from eval.eviction.rows import Mode
from eval.progress import each
from eval.workloads.weka import read_sessions
from sglang_histate.policy.score import Eviction

SKIPS = (0, 60, 300)
LOADS = ((6, 60.0), (12, 600.0), (24, 60.0))
"""Live sessions and the longest pause in seconds."""
SIZES = ((24576, 32), (32768, 16), (32768, 32), (65536, 32), (65536, 64))
"""Host memory in tokens of KV, and checkpoints on the SSD."""
TAUS = "1,3,6,10,15,20,30,50,100,300,1000"


def cells(options: Options) -> Iterator[tuple[str, Sequence[Request], Budgets]]:
    """Yield a name, the requests and the budgets of each cell; errors as in `read_sessions`."""
    for skip in SKIPS:
        found = islice(read_sessions(options.traces / BIG_FILE), skip, None)
        sessions = choose(found, options.sessions, options.context_tokens, options.turns)
        for live, gap_s in LOADS:
            requests = requests_of(
                sessions,
                live=live,
                longest_gap_s=gap_s,
                tokens_per_block=options.tokens_per_block,
                most_output=options.most_output,
            )
            for host_tokens, states in SIZES:
                budgets = replace(
                    options.budgets,
                    host_bytes=host_tokens * DEMO_UNITS.kv_token,
                    inflight_bytes=0,
                    ssd_bytes=(states + 1) * DEMO_UNITS.slab,
                )
                name = f"from session {skip:>3}, {live:>2} live, gap {gap_s:>3.0f}, host {host_tokens}, ssd {states}"
                yield name, requests, budgets


def main(argv: list[str] | None = None) -> int:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--taus", default=TAUS)
    given, rest = own.parse_known_args(argv)
    options = parse([*rest, "--dry", "--taus", given.taus])
    scores = [mode for mode in options.modes if mode.eviction.priced]
    lru, refresh = Mode(Eviction.LRU, 0.0), Mode(Eviction.LRU_REFRESH, 0.0)
    ratios: dict[Mode, list[float]] = {mode: [] for mode in (refresh, *scores)}
    sums = dict.fromkeys((lru, *ratios), 0)
    for name, requests, budgets in each(cells(options), "sweep", "load"):
        base = simulate(requests, lru, budgets, DEMO_UNITS).lost
        sums[lru] += base
        for mode, found in ratios.items():
            lost = simulate(requests, mode, budgets, DEMO_UNITS).lost
            sums[mode] += lost
            found.append(lost / max(base, 1))
        print(f"{name}: lru {base}; " + " ".join(f"{found[-1]:.2f}" for found in ratios.values()), flush=True)
    for mode, found in ratios.items():
        print(
            f"{mode.name:<16} geometric mean {geometric_mean(found):.3f}, sum {sums[mode] / max(sums[lru], 1):.3f}, "
            f"best {min(found):.2f}, worst {max(found):.2f}, worse than lru in {sum(r > 1.02 for r in found)} of {len(found)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
