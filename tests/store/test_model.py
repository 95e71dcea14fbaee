"""Random calls against a model: whatever the disk does, no wrong byte and no lost buffer or slab."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_histate.store import EntryState, MissReason, PutResult, ReadTicket

from .conftest import LAYOUT, SLAB, key, open_store, wait_finished
from .fakes import FakeDisk

SLABS, BUFFERS = 3, 4
numbers = st.integers(0, 6)
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


class StoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = FakeDisk()
        self.store = open_store(
            disk=self.disk,
            slabs=SLABS,
            record_buffers=BUFFERS,
            reader_threads=1,
            breaker_failures=3,
            breaker_refused_puts=2,
        )
        self.content: dict[int, int] = {}  # number -> the byte its newest record is filled with
        self.reading: dict[ReadTicket, int] = {}  # ticket -> the byte it must deliver
        self.held: list[ReadTicket] = []
        self.spare: list = []
        self.next_fill = 0
        self.last_completed = (0, 0)

    @rule(number=numbers)
    def put(self, number: int) -> None:
        record = self.store.acquire_record()
        if record is None:
            assert self.store.stats().buffers_free == 0
            return
        self.next_fill = (self.next_fill + 1) % 256
        record.payload[:] = self.next_fill
        was_there = self.store.lookup(key(number)) is not None
        result = self.store.put(key(number), 64 * number, record)
        assert (result is PutResult.ALREADY_STORED) == was_there
        if result is PutResult.STORED:
            self.content[number] = self.next_fill
        # Faults and rot must meet the same operation in every run; races are the stress test's subject.
        wait_finished(self.store)

    @rule(number=numbers)
    def begin_read(self, number: int) -> None:
        entry = self.store.lookup(key(number))
        ticket = self.store.begin_read(key(number))
        if isinstance(ticket, MissReason):
            assert (ticket is MissReason.ABSENT) == (entry is None)
            assert ticket in (MissReason.ABSENT, MissReason.NO_BUFFER)
            return
        assert ticket.shared == (entry.state is EntryState.WRITING)
        self.reading[ticket] = self.content[number]
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
        _, _, _, (first_write, _, first_read, _), _ = self.store.logical_state()
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
        for ticket in committed.reads:
            fill = self.reading.pop(ticket)
            assert ticket.ok is (ticket.miss_reason is None)
            if ticket.ok:
                assert (ticket.record.payload == fill).all(), "a dirty read"
                self.held.append(ticket)
            else:
                assert ticket.record is None

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.store.release(self.held.pop(0))

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        self.store.remove(key(number))
        assert self.store.lookup(key(number)) is None

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert self.store.stats().entries == 0

    @rule(fault=read_faults)
    def break_next_read(self, fault) -> None:
        self.disk.read_faults.append(fault)

    @rule(fault=write_faults)
    def break_next_write(self, fault) -> None:
        self.disk.write_faults.append(fault)

    @rule(position=st.integers(4096, 4096 + SLABS * SLAB - 1))
    def rot(self, position: int) -> None:
        self.disk.content[position] ^= 1

    @invariant()
    def budgets_hold(self) -> None:
        stats = self.store.stats()
        assert len(self.disk.content) == stats.file_bytes == 4096 + SLABS * SLAB
        assert self.disk.largest_offset <= stats.file_bytes
        assert stats.entries <= stats.slabs_used <= stats.slabs_total == SLABS
        assert 0 <= stats.buffers_free <= BUFFERS
        completed = self.store.completed()
        assert all(now >= before for now, before in zip(completed, self.last_completed, strict=True))
        self.last_completed = completed

    @invariant()
    def held_records_stay_as_they_are(self) -> None:
        for ticket in self.held:
            assert (ticket.record.payload[: LAYOUT.payload_bytes] == ticket.record.payload[0]).all()

    def teardown(self) -> None:
        wait_finished(self.store)
        self.took(self.store.poll())
        while self.held:
            self.release()
        stats = self.store.stats()
        assert stats.buffers_free == BUFFERS and stats.slabs_used == stats.entries
        assert stats.entries_writing == 0
        self.store.clear()
        assert self.store.stats().slabs_used == 0
        self.store.close()


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
