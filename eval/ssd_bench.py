"""``python -m eval.ssd_bench``: what the SSD tier costs at its start, what a look into its index costs, how fast it reads.

    recover  the store of an older run is opened: all slab headers are read and checked, what can be restored is
             put into the index. Half of the slabs are checkpoints, half KV extents of 24 pages, in trajectories
             of ten; every chain is whole, so all of them are kept. Seconds by the wall clock, best of the tries;
             CPU seconds are those of that try, all threads together.
    lookup   one key is looked up among so many entries, half of the keys are there. Microseconds, each call.
    snapshot the order of use of so many entries is taken for `stats.snap`: CPU time of the scheduler thread.
             (Another thread writes it.)
    read     restores through the store beside plain direct reads of the same bytes in the same run, and restores
             while nothing is written beside those while the writer is at its budget. Not part of `all`: it writes
             a file of some GiB to --dir and takes minutes. Runs best where nothing else does.

For the others the slab file is sparse: it has the size and the headers of a store of Qwen3.5-9B (slabs of 49 MiB, 20,000 of
them make 1 TB) and no payloads, which a start does not read. Reads are direct where the file system can.
The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, perf_counter_ns, process_time, thread_time

from eval.arguments import with_examples
from eval.progress import each
from eval.quantile import quantile
from eval.ssd_reads.command import add_options, run
from sglang_histate.store import NO_PARENT, CheckpointStore, Fingerprint, RecordKind, RecordLayout
from sglang_histate.store.blocks import SlabHeader, Superblock
from sglang_histate.store.disk import PosixDisk
from sglang_histate.store.layout import generation
from sglang_histate.store.records import RecordPool
from sglang_histate.store.snapshot import SnapshotFile

LAYOUT = RecordLayout((2 << 20, 48 << 10) * 24, kv_page_bytes=2 << 20)
IDENTITY = {"model": "ssd_bench"}
PAGES = LAYOUT.pages_per_extent
CHAIN = 10  # extents of a trajectory, each with a checkpoint at its end
RECOVER_TARGET_S_PER_SLAB = 1.0 / 20_000
LOOKUP_TARGET_US = 50.0
SNAPSHOTS = 20


class SparseDisk(PosixDisk):
    """A file with holes instead of reserved blocks."""

    def preallocate(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)


@dataclass(frozen=True)
class Row:
    what: str
    count: int
    figures: str
    target: str
    met: bool


def page_hash(trajectory: int, page: int) -> bytes:
    return trajectory.to_bytes(16, "big") + (page + 1).to_bytes(16, "big")


def fill(path: Path, slabs: int) -> None:
    """Write superblock and headers of a full store, in an order that is not that of the slabs."""
    fingerprint = Fingerprint.of(IDENTITY, LAYOUT)
    places = list(range(slabs))
    random.Random(1).shuffle(places)
    with path.open("wb") as file:
        file.truncate(LAYOUT.file_bytes(slabs))
        file.write(Superblock.of(LAYOUT, slabs, fingerprint, 1).pack())
        for number, slab in enumerate(places):
            trajectory, step = divmod(number // 2, CHAIN)
            kind = RecordKind.KV if number % 2 == 0 else RecordKind.CHECKPOINT
            first, end = step * PAGES, (step + 1) * PAGES
            is_kv = kind is RecordKind.KV
            header = SlabHeader(
                kind=kind,
                generation=generation(1, number + 1),
                key=page_hash(trajectory, end - 1),
                at_token=64 * end,
                content_bytes=LAYOUT.content_bytes(kind, PAGES),
                captured_at_us=0,
                fingerprint_half=fingerprint.digest[:16],
                part_sums=(7,) * len(LAYOUT.part_bytes(kind, PAGES)),
                parent=page_hash(trajectory, first - 1) if is_kv and first else NO_PARENT,
                page_keys=tuple(page_hash(trajectory, page) for page in range(first, end)) if is_kv else (),
            )
            file.seek(LAYOUT.slab_offset(slab))
            file.write(header.pack(LAYOUT.header_bytes))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, order=True)
class Start:
    seconds: float
    cpu_s: float
    direct: bool


def opened(path: Path, slabs: int) -> tuple[CheckpointStore, Start]:
    """Return a store on the file, and what that took."""
    disk = SparseDisk.open(path)
    # What a server has to do in any case is not counted: memory for records, the probe for direct reads.
    pool = RecordPool(LAYOUT, 1)
    with path.open("rb") as file:
        page = file.read(4096)
    direct = disk.enable_direct(page, [record.image for record in pool.records])
    started, cpu_started = perf_counter(), process_time()
    store = CheckpointStore.open(
        roots=[path.parent],
        fingerprint=IDENTITY,
        rank_name="tp0of1-pp0of1",
        size_bytes=LAYOUT.file_bytes(slabs),
        layout=LAYOUT,
        record_buffers=1,
        disks=[disk],
        snapshots=SnapshotFile(path.with_name("stats.snap")),
    )
    start = Start(perf_counter() - started, process_time() - cpu_started, direct)
    entries = store.recovery.checkpoints + store.recovery.extents
    assert entries == slabs and not store.recovery.losses, store.recovery
    return store, start


def measure_recovery(folder: Path, slabs: int, tries: int) -> Row:
    path = folder / "slabs.dat"
    fill(path, slabs)
    starts = []
    for _ in each(range(tries), "recover", "try"):
        store, start = opened(path, slabs)
        store.close()
        starts.append(start)
    best, limit = min(starts), RECOVER_TARGET_S_PER_SLAB * slabs
    figures = f"{best.seconds:.2f} s (CPU {best.cpu_s:.2f}), {best.seconds / slabs * 1e6:.0f} us a slab, "
    figures += "direct" if best.direct else "buffered"
    figures += ", tries: " + " ".join(f"{one.seconds:.2f}" for one in starts)
    return Row("recover", slabs, figures, f"<= {limit:.2g} s", best.seconds <= limit)


def measure_calls(folder: Path, entries: int, calls: int) -> list[Row]:
    path = folder / "slabs.dat"
    fill(path, entries)
    store, _ = opened(path, entries)
    draw = random.Random(2)
    there = [entry.key for entry in store.entries() if entry.kind is RecordKind.CHECKPOINT]
    wanted = [draw.choice(there) if draw.random() < 0.5 else draw.randbytes(32) for _ in range(calls)]
    times, hits = [], 0
    for key in wanted:
        started = perf_counter_ns()
        entry = store.lookup(key)
        times.append((perf_counter_ns() - started) / 1000)
        hits += entry is not None
    assert 0.4 * calls < hits < 0.6 * calls
    taken = [_snapshot_ms(store) for _ in range(SNAPSHOTS)]
    store.close()
    p99 = quantile(times, 0.99)
    figures = f"p50 {quantile(times, 0.5):.2f}, p99 {p99:.2f}, longest {max(times):.0f} us"
    lookup = Row("lookup", entries, figures, f"p99 <= {LOOKUP_TARGET_US:.0f} us", p99 <= LOOKUP_TARGET_US)
    figures = f"p50 {quantile(taken, 0.5):.2f}, longest {max(taken):.2f} ms of {SNAPSHOTS}"
    return [lookup, Row("snapshot", entries, figures, "none", True)]


def _snapshot_ms(store: CheckpointStore) -> float:
    """Return the CPU time of the call, once the other thread has written the snapshot."""
    started = thread_time()
    store.snapshot()
    took = thread_time() - started
    written = threading.Event()
    store._roots[0].writer.do(written.set)
    written.wait()
    return took * 1000


def table(rows: list[Row]) -> str:
    lines = [f"{'what':<8} {'slabs':>7}  {'target':<13}  {'':<7}  figures"]
    for row in rows:
        verdict = "" if row.target == "none" else "met" if row.met else "NOT MET"
        lines.append(f"{row.what:<8} {row.count:>7}  {row.target:<13}  {verdict:<7}  {row.figures}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.ssd_bench", description=__doc__.split("\n")[0])
    with_examples(
        parser,
        "python -m eval.ssd_bench recover --slabs 20000",
        "python -m eval.ssd_bench read --dir /nvme/bench",
    )
    parser.add_argument("what", nargs="?", default="all", choices=["recover", "lookup", "read", "all"])
    parser.add_argument("--slabs", type=int, default=20_000, help="slabs to recover")
    parser.add_argument("--entries", type=int, default=50_000, help="entries to look up in")
    parser.add_argument("--calls", type=int, default=200_000, help="lookups")
    parser.add_argument("--tries", type=int, default=3, help="recoveries, of which the fastest counts")
    parser.add_argument(
        "--dir", type=Path, default=Path("build"), help="where the slab file goes for a while"
    )
    add_options(parser)
    chosen = parser.parse_args(arguments)
    chosen.dir.mkdir(parents=True, exist_ok=True)
    if chosen.what == "read":
        return 0 if run(chosen) else 1
    rows = []
    with tempfile.TemporaryDirectory(prefix="ssd-bench-", dir=chosen.dir) as folder:
        if chosen.what != "lookup":
            rows.append(measure_recovery(Path(folder), chosen.slabs, chosen.tries))
        if chosen.what != "recover":
            rows += measure_calls(Path(folder), chosen.entries, chosen.calls)
    print(table(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
