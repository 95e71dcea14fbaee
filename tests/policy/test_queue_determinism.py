"""The same events name the same victims in every process, whatever it hashes strings with."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool, Unit

ROOT = Path(__file__).resolve().parents[2]


def is_not(own: tuple[int, int], unit: Unit) -> bool:
    return unit.checkpoint != own


def victims(events: int = 1500) -> list[str]:
    """Victims of a host under pressure, mode by mode."""
    found = []
    for mode in Eviction:
        draw = random.Random(11)
        tree = PrefixTree()
        queue = EvictionQueue(tree, Pool(Tier.HOST, 1000, 10), 10, mode=mode)
        ends = [0]
        for now in range(events):
            parent = draw.choice(ends)
            parent = parent if parent in tree else 0
            tokens = draw.randint(1, 50)
            node = now + 1
            tree.add(node, parent, tokens)
            tree.set_kv(node, Tier.HOST, True)
            tree.set_checkpoint(node, tokens, Tier.HOST, True)
            tree.observe_hit(parent, tree.tokens(parent))
            tree.touch(node, tokens, now)
            ends.append(node)
            while len(queue) > 60:
                unit = queue.victim(partial(is_not, (node, tokens)))
                assert unit is not None
                found.append(f"{mode} {unit}")
                if unit.checkpoint is not None:
                    tree.set_checkpoint(*unit.checkpoint, Tier.HOST, False)
                for gone in unit.nodes:
                    tree.remove(gone)
    return found


def test_two_processes_name_the_same_victims() -> None:
    runs = []
    for seed in ("1", "2"):
        runs.append(
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "from tests.policy.test_queue_determinism import *; print(*victims(), sep='\\n')",
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert runs[0] == runs[1]
    assert runs[0].split("\n")[:-1] == victims()
    assert len(victims()) > 1000
