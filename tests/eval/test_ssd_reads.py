"""The read bench reads what it wrote, every way the same bytes, and its figures add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.ssd_bench import main
from eval.ssd_reads.beside_writes import BesideWrites, Writing
from eval.ssd_reads.command import ratio, restore_lines, slower, window_lines
from eval.ssd_reads.filled import Sizes, filled, in_file_order
from eval.ssd_reads.restore import Pass, all_ways
from sglang_histate.store import CheckpointStore, RecordKind

SIZES = Sizes(layers=1, records=4)
RATE = 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def store(folder: Path):
    store = filled(folder, SIZES, RATE)
    yield store
    store.close()


def test_the_default_is_a_record_of_the_real_model() -> None:
    layout = Sizes(layers=24, records=1).layout
    assert layout.payload_bytes == 51_511_296 and layout.pages_per_extent == 24


@pytest.mark.parametrize("kind", list(RecordKind))
def test_every_way_reads_the_same_bytes(store: CheckpointStore, folder: Path, kind: RecordKind) -> None:
    entries = in_file_order(store, kind)
    assert len(entries) == 4
    before = store.stats()
    passes = all_ways(store, SIZES.path(folder), entries, (1, 2), rounds=3)
    size = 4 * store.layout.transfer_bytes(kind, entries[0].n_pages)
    assert set(passes) == {0, 1, 2} and all(len(three) == 3 for three in passes.values())
    for one in (one for three in passes.values() for one in three):
        assert (one.records, one.bytes_read, len(one.latencies_s)) == (4, size, 4)
        assert max(one.latencies_s) <= one.seconds and one.own_cpu_s <= one.cpu_s + 0.01
    # Two reads to check what arrives, then three rounds of two depths.
    assert store.stats().kinds[kind].reads_ok - before.kinds[kind].reads_ok == 2 + 3 * 2 * 4
    assert store.stats().buffers_free == store.stats().buffers_total
    assert [line[0] for line in restore_lines({kind: passes})[1:]] == [
        f"{kind.value}, plain read", f"{kind.value}, store, depth 1", f"{kind.value}, store, depth 2"
    ]  # fmt: skip


def test_windows_keep_to_the_writer_that_they_name(store: CheckpointStore) -> None:
    beside = BesideWrites(store, in_file_order(store, RecordKind.CHECKPOINT), reads_per_s=40, seconds=0.5)
    windows = {writing: [beside.window(writing)] for writing in Writing}
    assert all(len(one.latencies_s) == 20 for (one,) in windows.values())
    (nothing,), (budget,), (burst,) = windows.values()
    assert nothing.bytes_written == 0
    assert 0 < budget.bytes_written <= RATE * budget.seconds + 2 * store.layout.slab_bytes
    assert burst.bytes_written > 0 and not store.stats().drops.keys() - {"removed"}
    assert len(in_file_order(store, RecordKind.KV)) == 4, "what is read is not replaced"
    assert slower(windows, Writing.NOTHING, 0.95) == 1.0 and len(window_lines(windows)) == 4


def test_ratios_are_taken_round_by_round() -> None:
    def passes(*seconds: float) -> list[Pass]:
        return [Pass(1, 1000, one, 0.0, 0.0, (one,)) for one in seconds]

    assert ratio(passes(2.0, 8.0, 1.0), passes(1.0, 4.0, 1.0)) == 0.5


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--records", "2", "--rounds", "1", "--seconds", "0.2", "--reads-per-s", "20"]
    status = main(["read", *sizes, "--dir", str(folder)])
    shown = capsys.readouterr().out
    assert status == (1 if "NOT MET" in shown else 0)
    assert shown.count("met:") + shown.count("NOT MET:") == 3 and "checkpoint, store, depth 4" in shown
    assert not list(folder.iterdir())
