"""Several roots: where slabs lie, what a lost root costs, how it comes back, what a restart makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_histate.store import DropReason, MissReason, PutResult, ReadTicket, RecordKind
from sglang_histate.store.block_zero import EVERYTHING
from sglang_histate.store.blocks import Superblock
from sglang_histate.store.breaker import BreakerState
from sglang_histate.store.disk import FilePlace
from sglang_histate.store.fault_plan import Fault, FaultPlan
from sglang_histate.store.faults import FaultyDisk, from_environment
from sglang_histate.store.roots import BreakerRules
from sglang_histate.store.slabs import SlabPool
from sglang_histate.store.striping import Striping

from .conftest import LAYOUT, SLAB, chores_done, key, open_store, put, put_extent, settle
from .fakes import FakeDisk

RULES = BreakerRules(write_failures=3, read_failures=3, pause_puts=1000)


class Bench:
    """A store on `n_roots` disks in memory, and the agreed time."""

    def __init__(self, n_roots: int = 2, slabs: int = 8, **changes) -> None:
        self.disks = [
            FaultyDisk(FakeDisk(), FaultPlan(), seed=f"{root}", root=root) for root in range(n_roots)
        ]
        settings = dict(disks=self.disks, slabs=slabs, breakers=RULES, record_buffers=6)
        self.store = open_store(**(settings | changes))
        self.now_s = 1000.0

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.tick(self.now_s)
        settle(self.store)

    def put(self, *numbers: int) -> list[PutResult]:
        results = []
        for number in numbers:
            results.append(put(self.store, number))
            settle(self.store)
        return results

    def read(self, number: int) -> bool | MissReason:
        ticket = self.store.begin_read(key(number))
        if isinstance(ticket, MissReason):
            return ticket
        settle(self.store)
        if ticket.ok:
            assert (ticket.record.payload == number % 251).all(), "a dirty read"
        self.store.release(ticket)
        return bool(ticket.ok)

    def root_of(self, number: int) -> int:
        return self.store._index.get((key(number), RecordKind.CHECKPOINT)).slab % len(self.disks)

    def lose(self, root: int, fault: Fault = Fault.ENODEV) -> None:
        self.disks[root].plan = FaultPlan.even(1.0, [fault])

    def mend(self, root: int) -> None:
        self.disks[root].plan = FaultPlan()

    def states(self) -> list[tuple[str, str]]:
        return [(root.reads.state.value, root.writes.state.value) for root in self.store.stats().roots]

    def check_all_back(self) -> None:
        stats = self.store.stats()
        assert stats.buffers_free == stats.buffers_total and stats.slabs_used == stats.entries
        assert sum(root.slabs_used for root in stats.roots) == stats.slabs_used
        assert not self.store.outstanding


@pytest.mark.parametrize("n_roots", [1, 2, 3])
@pytest.mark.parametrize("slabs", [3, 7, 8])
def test_striping(n_roots: int, slabs: int):
    size = 4096 * n_roots + slabs * SLAB + 100
    striping = Striping.of(LAYOUT, size, n_roots)
    assert striping.slab_count == slabs and striping.total_bytes <= size
    places = {(striping.root(slab), striping.offset(slab)) for slab in range(slabs)}
    assert len(places) == slabs
    for root in range(n_roots):
        mine = [slab for slab in range(slabs) if striping.root(slab) == root]
        assert len(mine) == striping.slabs_in(root)
        assert [striping.slab(root, at) for at in range(len(mine))] == mine
        assert max(map(striping.offset, mine)) + SLAB == striping.file_bytes(root)


def test_free_slabs_are_taken_evenly():
    pool = SlabPool(7, 3)
    assert [pool.acquire((0, 1, 2)) % 3 for _ in range(7)] == [0, 0, 1, 2, 0, 1, 2]
    assert pool.acquire((0, 1, 2)) is None and pool.free == 0
    for slab in (4, 1, 6):
        pool.release(slab)
    assert pool.free_in(1) == 2 and pool.acquire((0,)) == 6 and pool.acquire((0, 2)) is None
    pool.occupy([1])
    assert pool.acquire((1,)) == 4 and pool.peak == 7


def test_every_root_gets_as_much_to_do():
    bench = Bench(3, slabs=9)
    bench.put(*range(9))
    assert [root.slabs_used for root in bench.store.stats().roots] == [3, 3, 3]
    assert all(bench.read(number) is True for number in range(9))
    assert bench.store.stats().file_bytes == sum(len(disk.inner.content) for disk in bench.disks)
    bench.store.close()
    assert all(disk.inner.closed for disk in bench.disks)


def test_a_lost_root_costs_its_share_and_comes_back(caplog):
    bench = Bench()
    bench.put(*range(6))
    here = [number for number in range(6) if bench.root_of(number) == 0]
    there = [number for number in range(6) if bench.root_of(number) == 1]
    bench.lose(1)
    assert [bench.read(number) for number in there] == [False] * 3, "the first reads fail"
    assert bench.states() == [("closed", "closed"), ("open", "closed")]
    assert caplog.text.count("the last reads failed (io_error)") == 1 and "disk 1" in caplog.text
    assert [bench.read(number) for number in here] == [True] * 3
    assert set(bench.put(10, 11, 12, 13)) == {PutResult.STORED}, "one goes in its turn, not more"
    assert {bench.root_of(number) for number in (10, 11, 12, 13)} == {0}
    assert not bench.store.stats().drops.get(DropReason.WRITE_ERROR), "what cannot be read is not written"
    bench.mend(1)
    bench.tick(0.5)
    assert bench.states()[1][0] == "open", "not before its time"
    bench.tick(RULES.read_pause_s)
    assert bench.states()[1] == ("closed", "closed")
    assert caplog.text.count("can be read again") == 1
    bench.put(20, 21, 22)
    assert 1 in {bench.root_of(number) for number in (20, 21, 22)}
    assert all(bench.read(number) is True for number in (20, 21, 22))
    bench.check_all_back()


def test_what_lies_on_a_lost_root_is_hidden_not_gone():
    bench = Bench(slabs=12)
    bench.put(*range(10))
    there = [number for number in range(10) if bench.root_of(number) == 1]
    bench.lose(1, Fault.EIO)
    for number in there[:3]:
        bench.read(number)
    hidden = there[3]
    reads = sum(bench.disks[1].counts.values())
    assert bench.store.lookup(key(hidden)) is None and bench.read(hidden) is MissReason.ROOT_DOWN
    assert sum(bench.disks[1].counts.values()) == reads, "nobody waits for it"
    assert bench.store.stats().misses[MissReason.ROOT_DOWN] == 1
    assert bench.store.stats().roots[1].hidden_lookups == 1
    assert bench.store.drop(key(there[4])), "but it can be dropped"
    for _ in range(3):
        bench.tick(RULES.read_pause_s)
        assert bench.states()[1][0] == "open", "the probe fails"
    bench.mend(1)
    bench.tick(RULES.read_pause_s)
    assert bench.store.lookup(key(hidden)) is not None and bench.read(hidden) is True
    assert bench.store.stats().roots[1].reads.times_opened == 1
    bench.check_all_back()


def test_what_is_hidden_can_be_stored_again_elsewhere():
    bench = Bench(slabs=12)
    bench.put(*range(10))
    there = [number for number in range(10) if bench.root_of(number) == 1]
    bench.lose(1)
    for number in there[:3]:
        bench.read(number)
    again = there[3]
    assert bench.put(again) == [PutResult.STORED] and bench.root_of(again) == 0
    assert bench.store.stats().drops[DropReason.ROOT_DOWN] == 1
    assert bench.read(again) is True
    bench.mend(1)
    bench.tick(RULES.read_pause_s)
    assert bench.read(again) is True
    bench.check_all_back()


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EROFS, Fault.EIO, Fault.SHORT])
def test_a_root_that_takes_no_writes_is_still_read(fault: Fault, caplog):
    bench = Bench(slabs=8)
    bench.put(*range(4))
    bench.disks[1].plan = FaultPlan.parse(f"{fault.value}:write=1")
    number = 10
    while bench.states()[1][1] == "closed":
        bench.put(number)
        number += 1
    assert number <= 20 and "nothing is written there" in caplog.text
    assert all(bench.read(number) is True for number in range(4))
    dropped = sum(bench.store.stats().drops.values())
    assert set(bench.put(*range(30, 60))) == {PutResult.STORED}, "there is room on the other root"
    drops = bench.store.stats().drops
    assert set(drops) <= {DropReason.EVICTED, DropReason.WRITE_ERROR, DropReason.SHORT_WRITE}
    assert drops[DropReason.EVICTED] >= 26 and sum(drops.values()) >= dropped
    bench.mend(1)
    bench.tick(0.5)
    bench.tick(RULES.write_pause_s)
    assert bench.states()[1] == ("closed", "trying"), "the next write decides"
    bench.put(70)
    assert bench.root_of(70) == 1 and bench.states()[1] == ("closed", "closed")
    assert "can be written again" in caplog.text and bench.read(70) is True
    bench.check_all_back()


def test_puts_end_the_pause_where_nobody_tells_the_time():
    bench = Bench(breakers=BreakerRules(write_failures=2, pause_puts=5))
    bench.disks[1].plan = FaultPlan.parse("eio:write=1")
    bench.put(*range(4))
    assert bench.states()[1] == ("closed", "open")
    bench.mend(1)
    puts = 0
    while bench.states()[1] != ("closed", "closed"):
        assert bench.states()[1] == ("closed", "open") and bench.store.lookup(key(10 + puts)) is None
        bench.put(10 + puts)
        puts += 1
    assert 3 <= puts <= 5 and bench.root_of(10 + puts - 1) == 1, "the put that ends the pause is the try"


def test_all_roots_lost():
    bench = Bench()
    bench.put(*range(6))
    for root in (0, 1):
        bench.lose(root)
    results = [bench.read(number) for number in range(6)]
    assert set(results) <= {False, MissReason.ROOT_DOWN}
    assert bench.states() == [("open", "closed")] * 2
    assert bench.put(10, 11) == [PutResult.BREAKER_OPEN] * 2
    for root in (0, 1):
        bench.mend(root)
    bench.tick(0.5)
    bench.tick(RULES.read_pause_s)
    assert bench.put(10, 11) == [PutResult.STORED] * 2 and bench.read(10) is True
    assert not bench.store.restless
    bench.check_all_back()


def test_the_store_says_when_it_needs_the_time():
    bench = Bench()
    assert not bench.store.restless
    bench.put(*range(6))
    bench.lose(0)
    for number in [number for number in range(6) if bench.root_of(number) == 0]:
        bench.read(number)
    assert bench.store.restless and not bench.store.outstanding
    bench.mend(0)
    bench.tick(0.5)
    bench.tick(RULES.read_pause_s)
    assert not bench.store.restless


def test_a_disk_that_was_cut_short_is_made_whole_by_the_probe():
    bench = Bench(slabs=8)
    bench.put(*range(8))
    disk = bench.disks[1].inner
    del disk.content[4096:]
    there = [number for number in range(8) if bench.root_of(number) == 1]
    assert [bench.read(number) for number in there[:3]] == [False] * 3
    assert bench.store.stats().misses == {MissReason.SHORT_READ: 3}
    bench.tick(0.5)
    bench.tick(RULES.read_pause_s)
    bench.put(*range(20, 24))
    assert all(bench.read(number) is True for number in range(20, 24))
    del disk.content[:]
    for number in [number for number in range(24) if bench.store.lookup(key(number)) is not None]:
        bench.read(number)
    assert bench.states()[1][0] == "open"
    bench.tick(0.5)
    bench.tick(RULES.read_pause_s)
    assert disk.revived and len(disk.content) == disk.size and bench.states()[1][0] == "closed"
    bench.check_all_back()


# Real files


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


def opened(roots: list[Path], slabs: int = 8, **changes):
    return open_store(
        roots=roots, slabs=slabs, keep_unrestorable=True, record_buffers=6, breakers=RULES, **changes
    )


def readable(store, numbers) -> list[int]:
    found = []
    for number in numbers:
        ticket = store.begin_read(key(number))
        if isinstance(ticket, ReadTicket):
            settle(store)
            if ticket.ok:
                assert (ticket.record.payload == number % 251).all(), "a dirty read"
                found.append(number)
            store.release(ticket)
    return found


def fill(store, numbers) -> None:
    for number in numbers:
        put(store, number)
        settle(store)


def superblock(root: Path) -> Superblock:
    (file,) = root.glob("*/*/slabs.dat")
    found = Superblock.parse(file.read_bytes()[:4096])
    assert found is not None
    return found


def test_each_file_says_which_it_is(roots):
    opened(roots).close()
    assert [(block.root, block.n_roots, block.slab_count) for block in map(superblock, roots)] == [
        (0, 2, 4),
        (1, 2, 4),
    ]
    assert [block.clean for block in map(superblock, roots)] == [True, True]
    assert (
        sum(file.stat().st_size for root in roots for file in root.glob("*/*/slabs.dat")) == 8192 + 8 * SLAB
    )


def test_a_restart_finds_all_roots(roots):
    store = opened(roots)
    fill(store, range(8))
    put_extent(store, 1)
    settle(store)
    store.close()
    store = opened(roots)
    assert store.recovery.clean and store.recovery.checkpoints == 7 and store.recovery.extents == 1
    assert readable(store, range(8)) == list(range(1, 8))
    store.close()


def test_another_order_of_the_roots_finds_the_same(roots, caplog):
    store = opened(roots)
    fill(store, range(8))
    store.touch(key(0))
    store.close()
    caplog.set_level("INFO")
    store = opened(roots[::-1])
    assert f"{roots[1]} was directory 2 of 2 before, now it is 1 of 2" in caplog.text
    assert readable(store, range(8)) == list(range(8))
    assert [int.from_bytes(entry.key) for entry in store.entries()][-8:] == list(range(8))
    fill(store, [20])
    assert store.lookup(key(1)) is not None or store.lookup(key(0)) is not None
    store.close()


def test_a_root_that_is_taken_away_and_brought_back(roots):
    store = opened(roots)
    fill(store, range(8))
    kept = {number for number in range(8) if store.lookup(key(number)).slab % 2 == 0}
    store.close()
    store = opened(roots[:1], slabs=4)
    assert set(readable(store, range(8))) == kept
    fill(store, [1])  # also on the root that is away, but older there
    newer = store.lookup(key(1)).generation
    store.close()
    store = opened(roots)
    assert store.lookup(key(1)).generation == newer
    assert len(readable(store, range(8))) >= 7
    store.close()


def test_a_clear_holds_for_a_root_that_was_away(roots):
    store = opened(roots)
    fill(store, range(8))
    store.close()
    store = opened(roots[:1], slabs=4)
    store.clear()
    chores_done(store)
    store.close()
    store = opened(roots)
    assert store.stats().entries == 0
    store.close()


def test_a_new_root_beside_an_old_one_loses_nothing(roots):
    store = opened(roots[:1], slabs=4)
    fill(store, range(4))
    store.close()
    store = opened(roots)
    assert readable(store, range(4)) == list(range(4))
    store.close()
    # A crash in the middle of the first start with a new root: its superblock still says that nothing counts.
    shutil.rmtree(roots[1])
    opened(roots).close()
    (file,) = roots[1].glob("*/*/slabs.dat")
    block = superblock(roots[1])
    with file.open("r+b") as out:
        out.write(Superblock.of(LAYOUT, 4, FINGERPRINT, block.epoch, oldest_valid=EVERYTHING).pack())
    store = opened(roots)
    assert readable(store, range(4)) == list(range(4))
    store.close()


FINGERPRINT = open_store(disks=[FakeDisk()]).fingerprint


def test_a_damaged_superblock_costs_its_root(roots):
    store = opened(roots)
    fill(store, range(8))
    kept = [number for number in range(8) if store.lookup(key(number)).slab % 2 == 0]
    store.close()
    (file,) = roots[1].glob("*/*/slabs.dat")
    with file.open("r+b") as out:
        out.write(bytes(4096))
    store = opened(roots)
    assert readable(store, range(8)) == kept and not store.recovery.clean
    store.close()


def test_a_deleted_file_goes_on_and_is_counted(roots, monkeypatch, caplog):
    monkeypatch.setattr("sglang_histate.store.disk.LOOK_AGAIN_S", 0.0)
    store = opened(roots)
    fill(store, range(4))
    (file,) = roots[1].glob("*/*/slabs.dat")
    shutil.rmtree(file.parent)
    fill(store, range(4, 8))
    for now_s in (1.0, 2.0, 3.0):
        store.tick(now_s)
    stats = store.stats()
    assert stats.files_lost == 1
    assert [root.file_place for root in stats.roots] == [FilePlace.PRESENT, FilePlace.DELETED]
    assert caplog.text.count("was deleted behind its back") == 1
    assert readable(store, range(8)) == list(range(8)), "it serves on"
    store.close()
    store = opened(roots)
    assert len(readable(store, range(8))) == 4, "but a restart finds the other root only"
    store.close()


def test_faults_are_for_the_root_that_they_name(tmp_path: Path):
    rules = tmp_path / "rules"
    rules.write_text("eio@1=1")
    environment = {"HISTATE_TEST_DISK_FAULTS": f"@{rules}"}
    disks = [from_environment(FakeDisk(), "tp0", LAYOUT, root, environment=environment) for root in range(2)]
    for disk in disks:
        disk.preallocate(SLAB)
    page = memoryview(bytearray(4096))
    assert disks[0].read_at([page], 0) == 4096
    with pytest.raises(OSError, match="made by a test"):
        disks[1].read_at([page], 0)
    rules.write_text("")
    disks[1]._plan_read_s = 0.0
    assert disks[1].read_at([page], 0) == 4096
    with pytest.raises(ValueError, match="no fault"):
        FaultPlan.parse("lost:read=1")
    with pytest.raises(ValueError, match="no fault"):
        FaultPlan.parse("gremlins=0.5")


def test_stats_name_the_breaker(roots):
    store = opened(roots)
    first, second = store.stats().roots
    assert (first.name, second.name) == (str(roots[0]), str(roots[1]))
    assert first.reads.state is BreakerState.CLOSED and first.writes.reason is None
    assert not store.stats().breaker_open
    store.close()
