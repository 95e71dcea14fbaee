"""Random calls against a model: whatever the disk does, no wrong byte and no lost buffer or slab.

With crashes: the disk stays as it is, with the write under way torn at some sector, and another store opens it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_histate.store import (
    NO_NAMESPACE,
    NO_PARENT,
    DropReason,
    EntryState,
    Key,
    MissReason,
    PutResult,
    ReadTicket,
    RecordKind,
    namespace_of,
)
from sglang_histate.store.roots import BreakerRules

from .conftest import (
    LAYOUT,
    SLAB,
    chores_done,
    fill_extent,
    is_extent,
    key,
    open_store,
    page_keys,
    wait_finished,
)
from .fakes import FakeDisk

SLABS, BUFFERS = 3, 4
NAMESPACES = (NO_NAMESPACE, namespace_of(None, "tenant"))
KV = RecordKind.KV
numbers = st.integers(0, 4)
kinds = st.sampled_from(list(RecordKind))
read_faults = st.one_of(
    st.sampled_from(["eio", "einval"]),
    st.tuples(st.just("short"), st.integers(0, SLAB)),
    st.tuples(st.just("flip"), st.integers(0, SLAB - 1)),
)
write_faults = st.one_of(
    st.sampled_from(["eio", "enospc"]),
    st.tuples(st.sampled_from(["short", "tear"]), st.integers(0, SLAB // 512 - 1)),
    st.tuples(st.just("flip"), st.integers(0, SLAB - 1)),
)


class Disk(FakeDisk):
    """Does not lie about the superblock: what was cleared could come back, and nothing could be done about it."""

    def write_at(self, buffers, offset: int) -> int:
        while offset == 0 and self.write_faults and self.write_faults[0][0] in ("tear", "flip"):
            self.write_faults.popleft()
        return super().write_at(buffers, offset)


class StoreAgainstModel(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["least recently used", "oldest", "careless", "miser"]))
    def open(self, policy: str) -> None:
        self.policy = policy
        self.written: dict[tuple[Key, int], tuple[int, int]] = {}  # name, generation -> fill and pages
        self.slab_of: dict[tuple[Key, int], int] = {}
        self.well_written: set[tuple[Key, int]] = set()  # of these, what the disk took without a fault
        self.sound: set[tuple[Key, int]] = set()  # and what was then committed; nothing has harmed it since
        self.cleared_upto = 0  # no generation up to this one may come back
        self.purged: set[tuple[Key, int]] = set()  # nor any of these
        self.open_disk(Disk())

    def open_disk(self, disk: FakeDisk, slabs: int = SLABS, keep: bool = True) -> None:
        self.disk, self.slabs = disk, slabs
        self.present: dict[Key, None] = {}  # what the callbacks say, in order of arrival
        self.store = open_store(
            disk=self.disk,
            slabs=slabs,
            keep=keep,
            keep_unrestorable=True,
            record_buffers=BUFFERS,
            reader_threads=1,
            breakers=BreakerRules(write_failures=3, pause_puts=2, read_failures=3),
            on_present=self.on_present,
            on_gone=self.on_gone,
            choose_victim={
                "least recently used": None,
                "oldest": lambda: next(filter(self.store.replaceable, self.present), None),
                "careless": lambda: next(iter(self.present), None),
                "miser": lambda: None,
            }[self.policy],
        )
        self.content: dict[Key, tuple[int, int]] = {}  # name -> fill and pages of its newest record
        self.reading: dict[ReadTicket, tuple[int, int]] = {}  # ticket -> what it must deliver
        self.held: list[tuple[ReadTicket, int]] = []
        self.next_fill = 0
        self.last_completed = (0, 0)

    def on_present(self, hashed: bytes, kind: RecordKind) -> None:
        assert Key(hashed, kind) not in self.present
        self.present[Key(hashed, kind)] = None

    def on_gone(self, hashed: bytes, kind: RecordKind, reason: DropReason) -> None:
        assert reason is reason.agreed
        del self.present[Key(hashed, kind)]

    @rule(number=numbers, kind=kinds, n_pages=st.integers(1, LAYOUT.pages_per_extent))
    def put(self, number: int, kind: RecordKind, n_pages: int) -> None:
        namespace = NAMESPACES[number % 2]
        record = self.store.acquire_record()
        if record is None:
            assert self.store.stats().buffers_free == 0
            return
        self.next_fill = (self.next_fill + 1) % 256
        was_there = self.store.lookup(key(number), kind) is not None
        was_full = self.store.stats().slabs_used == self.slabs
        self.next_is_well = not self.disk.write_faults
        if kind is KV:
            fill_extent(record, n_pages, self.next_fill)
            names = page_keys(number, n_pages)
            result = self.store.put_extent(names, 64 * number, record, parent=NO_PARENT, namespace=namespace)
        else:
            record.payload[:] = self.next_fill
            result = self.store.put(key(number), 64 * number, record, namespace=namespace)
        assert (result is PutResult.ALREADY_STORED) == was_there
        if result is PutResult.STORED:
            name = Key(key(number), kind)
            entry = self.store.lookup(*name)
            self.content[name] = self.written[name, entry.generation] = self.next_fill, n_pages
            # Its slab is overwritten, whatever comes of it.
            self.sound = {one for one in self.sound if self.slab_of[one] != entry.slab}
            self.slab_of[name, entry.generation] = entry.slab
            if self.next_is_well:
                self.well_written.add((name, entry.generation))
        if result is PutResult.NO_SLAB:
            assert was_full
            assert self.policy == "miser" or not any(map(self.store.replaceable, self.present))
        if result is PutResult.BAD_VICTIM:
            assert was_full and self.policy == "careless"
        # Faults and rot must meet the same operation in every run; races are the stress test's subject.
        wait_finished(self.store)

    @rule(number=numbers, kind=kinds)
    def begin_read(self, number: int, kind: RecordKind) -> None:
        entry = self.store.lookup(key(number), kind)
        ticket = self.store.begin_read(key(number), kind=kind)
        if isinstance(ticket, MissReason):
            assert (ticket is MissReason.ABSENT) == (entry is None)
            assert ticket in (MissReason.ABSENT, MissReason.NO_BUFFER)
            return
        assert ticket.shared == (entry.state is EntryState.WRITING)
        assert not self.store.replaceable(entry.name)
        self.reading[ticket] = self.content[entry.name]
        wait_finished(self.store)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        ticket = data.draw(st.sampled_from(list(self.reading)))
        self.store.cancel_read(ticket)
        del self.reading[ticket]

    @rule(data=st.data())
    def commit_some(self, data) -> None:
        wait_finished(self.store)
        done_writes, done_reads = self.store.completed()
        first_write, _, first_read, _ = self.store.logical_state()[3]
        upto = (
            data.draw(st.integers(first_write, done_writes)),
            data.draw(st.integers(first_read, done_reads)),
        )
        write_ok, read_ok = self.store.outcomes(*upto)
        if data.draw(st.booleans()):  # another rank had bad luck
            write_ok = [ok and data.draw(st.booleans()) for ok in write_ok]
            read_ok = [ok and data.draw(st.booleans()) for ok in read_ok]
        self.took(self.store.commit(write_ok, read_ok))

    @rule()
    def poll(self) -> None:
        wait_finished(self.store)
        self.took(self.store.poll())

    def took(self, committed) -> None:
        for entry in self.store.entries():
            if entry.state is EntryState.LIVE and (entry.name, entry.generation) in self.well_written:
                self.well_written.discard((entry.name, entry.generation))
                self.sound.add((entry.name, entry.generation))
        for ticket in committed.reads:
            fill, n_pages = self.reading.pop(ticket)
            assert ticket.ok is (ticket.miss_reason is None)
            if ticket.ok:
                assert ticket.n_pages == (n_pages if ticket.kind is KV else 0)
                self.held.append((ticket, fill))
                self.check_bytes(ticket, fill)
            else:
                assert ticket.record is None

    def check_bytes(self, ticket: ReadTicket, fill: int) -> None:
        if ticket.kind is KV:
            assert is_extent(ticket.record, ticket.n_pages, fill), "a dirty read"
        else:
            assert (ticket.record.payload == fill).all(), "a dirty read"

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.store.release(self.held.pop(0)[0])

    @rule(number=numbers, kind=kinds, reason=st.sampled_from([DropReason.REMOVED, DropReason.ORPHANED]))
    def drop(self, number: int, kind: RecordKind, reason: DropReason) -> None:
        was_there = self.store.lookup(key(number), kind) is not None
        assert self.store.drop(key(number), reason, kind=kind) is was_there
        assert self.store.lookup(key(number), kind) is None

    @rule(number=numbers, kind=kinds)
    def touch(self, number: int, kind: RecordKind) -> None:
        self.store.touch(key(number), kind)

    @rule()
    def clear(self) -> None:
        well = not self.disk.write_faults
        self.store.clear()
        assert self.store.stats().entries == 0
        chores_done(self.store)
        if well:
            self.cleared_upto = self.store._intake.newest
        self.sound.clear()
        self.well_written.clear()

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def purge(self, namespace: bytes | None) -> None:
        self.disk.read_faults.clear()  # a header that cannot be read goes too, whoever's it is
        well = not self.disk.write_faults
        entries = [entry for entry in self.store.entries() if namespace in (None, entry.namespace)]
        assert self.store.purge(namespace) == len(entries)
        chores_done(self.store)
        gone = {one for one in self.written if namespace in (None, NAMESPACES[one[0].hash[-1] % 2])}
        if well:
            self.purged |= gone
        self.sound -= gone
        self.well_written -= gone

    @rule(
        data=st.data(),
        sectors=st.none() | st.integers(0, SLAB // 512),
        slabs=st.integers(2, 4),
        orderly=st.booleans(),
        keep=st.sampled_from([True, True, True, False]),
    )
    def crash(self, data, sectors: int | None, slabs: int, orderly: bool, keep: bool) -> None:
        """Stop at once, maybe with a write under way of which so many sectors got to the disk; open again."""
        self.disk.read_faults.clear()
        self.disk.write_faults.clear()
        if sectors is not None:
            self.disk.write_faults.append(("tear", sectors))
            self.put(data.draw(numbers), data.draw(kinds), data.draw(st.integers(1, LAYOUT.pages_per_extent)))
            self.disk.write_faults.clear()
        elif orderly:
            wait_finished(self.store)
            self.store.close()
        disk = Disk()
        disk.content = bytearray(self.disk.content)
        self.reading.clear()
        while self.held:
            self.release()
        self.store.close()
        assert not self.present
        newest = max((generation for _, generation in self.written), default=0)
        self.open_disk(disk, slabs, keep)
        assert self.store.recovery.clean is (orderly and sectors is None)
        if not keep:
            assert not self.present
            self.cleared_upto, self.sound = newest, set()
        for entry in self.store.entries():
            assert entry.state is EntryState.LIVE and self.cleared_upto < entry.generation <= newest
            assert (entry.name, entry.generation) not in self.purged
            self.content[entry.name] = self.written[entry.name, entry.generation]
            assert entry.n_pages == (self.content[entry.name][1] if entry.kind is KV else 0)
        self.sound = {one for one in self.sound if self.slab_of[one] < slabs}
        for name, generation in self.sound:
            entry = self.store.lookup(*name)
            assert entry is not None and entry.generation >= generation, "what was committed is lost"
        assert self.store._intake.newest > newest

    @rule(fault=read_faults)
    def break_next_read(self, fault) -> None:
        self.disk.read_faults.append(fault)

    @rule(fault=write_faults)
    def break_next_write(self, fault) -> None:
        self.disk.write_faults.append(fault)

    @rule(position=st.integers(4096, 4096 + SLABS * SLAB - 1))
    def rot(self, position: int) -> None:
        if position < len(self.disk.content):
            self.disk.content[position] ^= 1
            slab = (position - 4096) // SLAB
            for harmed in [one for one, at in self.slab_of.items() if at == slab]:
                self.sound.discard(harmed)
                self.well_written.discard(harmed)

    @invariant()
    def budgets_hold(self) -> None:
        stats = self.store.stats()
        assert len(self.disk.content) == stats.file_bytes == 4096 + self.slabs * SLAB
        assert self.disk.largest_offset <= stats.file_bytes
        assert stats.entries <= stats.slabs_used <= stats.slabs_total == self.slabs
        assert 0 <= stats.buffers_free <= BUFFERS
        completed = self.store.completed()
        assert all(now >= before for now, before in zip(completed, self.last_completed, strict=True))
        self.last_completed = completed

    @invariant()
    def the_policy_knows_what_is_there(self) -> None:
        assert self.present.keys() == {Key(e[0], RecordKind(e[1])) for e in self.store.logical_state()[0]}

    @invariant()
    def kinds_add_up(self) -> None:
        stats = self.store.stats()
        parts = stats.kinds.values()
        assert stats.slabs_used == sum(part.slabs_used for part in parts)
        assert stats.bytes_used == sum(part.bytes_used for part in parts)
        assert stats.entries == sum(part.entries for part in parts)
        for kind, part in stats.kinds.items():
            assert part.entries == sum(name.kind is kind for name in self.present)
            assert part.content_bytes <= part.slabs_used * (SLAB - LAYOUT.header_bytes)
            came = part.recovered + part.puts.get(PutResult.STORED, 0)
            assert part.entries == came - sum(part.drops.values())

    @invariant()
    def held_records_stay_as_they_are(self) -> None:
        for ticket, fill in self.held:
            self.check_bytes(ticket, fill)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        # A failed write is followed by the question whether its thread has returned, which `tick` asks again of ranks
        # that said no.
        now_s = 0.0
        while self.store.outstanding or self.store._in_flight.overdue.holds:
            wait_finished(self.store)
            self.took(self.store.poll())
            now_s += 1.0
            self.store.tick(now_s)
            assert now_s < 1000, "the store does not come to rest"
        while self.held:
            self.release()
        stats = self.store.stats()
        assert stats.buffers_free == BUFFERS and stats.slabs_used == stats.entries
        assert stats.entries_writing == 0
        self.store.clear()
        stats = self.store.stats()
        assert stats.slabs_used == 0 and not self.present
        assert all((p.entries, p.slabs_used, p.content_bytes) == (0, 0, 0) for p in stats.kinds.values())
        self.store.close()


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
