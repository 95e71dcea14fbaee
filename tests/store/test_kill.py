"""kill -9 at any moment, then the same file again: nothing wrong is served, nothing durable is lost.

HISTATE_KILL_ROUNDS says how often (15). Each round works on the file that the one before left behind; what is
checked is a copy of it, so that a crash is followed by a crash.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sglang_histate.store import EntryState, LossReason, ReadTicket, RecordKind
from sglang_histate.store.layout import epoch_of

from .conftest import chores_done, settle
from .kill_child import SLABS, bytes_of, content, open_store

ROUNDS = int(os.environ.get("HISTATE_KILL_ROUNDS", "15"))
Name = tuple[RecordKind, int]


@dataclass
class Journal:
    """What the child says is on the disk."""

    epoch: int = 0
    durable: dict[Name, int] = field(default_factory=dict)  # name -> generation
    cleared: int = 0
    newest: int = 0

    def read(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        before: dict[Name, int] = {}
        for line in lines:
            word, *rest = line.split()
            if word == "ready":
                assert int(rest[0]) > self.epoch, "epochs rise"
                self.epoch = int(rest[0])
                before, self.durable = self.durable, {}
            elif word == "=":
                name, generation = (RecordKind(rest[0]), int(rest[1])), int(rest[2])
                if before.get(name) == generation:  # else its payload may be torn: nobody has read it
                    self.durable[name] = generation
            elif word == "+":
                name, generation = (RecordKind(rest[0]), int(rest[1])), int(rest[2])
                assert generation > self.newest and epoch_of(generation) == self.epoch, "generations rise"
                self.newest = generation
                self.durable[name] = generation
            elif word == "-":
                self.durable.pop((RecordKind(rest[0]), int(rest[1])), None)
            else:
                self.cleared = int(rest[0])


@dataclass
class Tally:
    durable: int = 0
    durable_hits: int = 0
    recovered: int = 0
    hits: int = 0
    torn: int = 0  # recovered, and found bad by the read
    unsound: int = 0
    while_opening: int = 0


def work_and_kill(root: Path, journal: Path, draw: random.Random) -> bool:
    """Return whether the child had opened its store."""
    command = [
        sys.executable,
        "-m",
        "tests.store.kill_child",
        str(root),
        str(journal),
        str(draw.randrange(10**9)),
    ]
    child = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        opening = draw.random() < 0.15
        before = journal.stat().st_size if journal.exists() else 0
        while not opening and (not journal.exists() or journal.stat().st_size == before):
            assert child.poll() is None and time.monotonic() < deadline, "the child did not start"
            time.sleep(0.002)
        time.sleep(draw.random() * (0.6 if opening else 0.25))
        assert child.poll() is None, "the child ended by itself"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    return journal.exists() and journal.stat().st_size > before


def check(root: Path, journal: Journal, tally: Tally) -> None:
    store = open_store(root)
    chores_done(store)  # it writes a snapshot of its own
    assert sorted(file.name for file in root.glob("*/*/*") if file.name != "stats.snap") == ["slabs.dat"]
    assert epoch_of(store._intake.newest) > journal.epoch
    found = {(entry.kind, int.from_bytes(entry.key, "big")): entry for entry in store.entries()}
    assert all(entry.state is EntryState.LIVE for entry in found.values())
    assert all(entry.generation > journal.cleared for entry in found.values()), "a cleared one is back"
    hits = set()
    for (kind, number), entry in found.items():
        ticket = store.begin_read(entry.key, kind=kind)
        assert isinstance(ticket, ReadTicket)
        settle(store)
        if ticket.ok:
            assert (bytes_of(kind, number, ticket.record) == content(kind, number)).all(), "a dirty hit"
            hits.add((kind, number))
        store.release(ticket)
    stats = store.stats()
    assert stats.slabs_used == stats.entries == len(hits), "a leaked slab"
    assert stats.buffers_free == stats.buffers_total
    for name, generation in journal.durable.items():
        assert name not in found or found[name].generation >= generation, "an older one is back"
    tally.durable += len(journal.durable)
    tally.durable_hits += len(hits & journal.durable.keys())
    tally.recovered += len(found)
    tally.hits += len(hits)
    tally.torn += len(found) - len(hits)
    tally.unsound += store.recovery.losses.get(LossReason.UNSOUND, 0)
    assert set(store.recovery.losses) <= {LossReason.UNSOUND, LossReason.CLEARED, LossReason.DUPLICATE}
    store.close()


def test_kill(tmp_path: Path):
    draw, journal, tally = random.Random(11), Journal(), Tally()
    root, copy, lines = tmp_path / "ssd", tmp_path / "copy", tmp_path / "journal"
    for _ in range(ROUNDS):
        lines.unlink(missing_ok=True)
        tally.while_opening += not work_and_kill(root, lines, draw)
        journal.read(lines)
        if not root.exists():
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        check(copy, journal, tally)
    print(f"\n{ROUNDS} rounds: {tally}")
    assert tally.durable > SLABS and tally.durable_hits >= 0.9 * tally.durable
