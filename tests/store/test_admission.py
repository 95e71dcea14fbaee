"""Admission of writes by value, and what gives way when the writer is late. No store, no thread."""

from __future__ import annotations

import pytest

from sglang_histate.store.admission import Admission, Claim, WriteLimits
from sglang_histate.store.index import Entry
from sglang_histate.store.kinds import Key, RecordKind
from sglang_histate.store.layout import NO_NAMESPACE, NO_PARENT, RecordLayout
from sglang_histate.store.operations import WriteOperation
from sglang_histate.store.reasons import DropReason, PutResult

LAYOUT = RecordLayout((4096,))
SIZE = LAYOUT.transfer_bytes(RecordKind.CHECKPOINT, 0)
NOW = 1_000_000.0


def admission(**limits) -> Admission:
    made = Admission(WriteLimits(**limits), LAYOUT)
    made.tick(NOW)
    return made


def ask(made: Admission, number: int, value: float | None) -> Claim | PutResult:
    return made.claim(Key(number.to_bytes(32, "big")), SIZE, value)


def write(made: Admission, number: int, value: float | None, queued: bool = True) -> WriteOperation:
    key = number.to_bytes(32, "big")
    entry = Entry(key, RecordKind.CHECKPOINT, 64, NO_PARENT, (), NO_NAMESPACE, slab=number, generation=number)
    operation = WriteOperation(entry, record=None, captured_at_us=0, value=value)  # type: ignore[arg-type]
    made.submitted(operation, queued)
    return operation


def test_without_limits_everything_is_taken() -> None:
    made = admission()
    assert all(isinstance(ask(made, number, 0.0), Claim) for number in range(1000))
    queue = [write(made, number, 0.0) for number in range(1000)]
    made.tick(NOW + 1e6)
    assert made.crowded_out(queue, 0.0) is None


def test_the_worthless_are_refused_while_bytes_are_short_and_all_when_there_are_none() -> None:
    made = admission(bytes_per_s=4 * SIZE)  # a burst of 20 records
    for number in range(10):
        assert isinstance(ask(made, number, float(number)), Claim)
    assert isinstance(ask(made, 10, 5.0), Claim), "half of the burst is there"
    for number in range(11, 16):
        assert isinstance(ask(made, number, 9.0 + number), Claim)
    assert ask(made, 20, 0.5) is PutResult.LOW_VALUE
    for number in range(30, 34):
        assert isinstance(ask(made, number, None), Claim), "worth any price"
    assert ask(made, 40, 1e9) is PutResult.WRITE_BUDGET
    assert ask(made, 41, None) is PutResult.WRITE_BUDGET
    made.tick(NOW + 1)
    assert isinstance(ask(made, 40, 1e9), Claim)


def test_what_is_given_back_is_there_again() -> None:
    made = admission(bytes_per_s=0, bytes_per_day=SIZE)
    assert ask(made, 1, None) is PutResult.WRITE_BUDGET
    made = admission(bytes_per_day=SIZE)
    claim = ask(made, 1, None)
    assert isinstance(claim, Claim) and ask(made, 2, None) is PutResult.DAILY_CAP
    made.give_back(claim)
    assert isinstance(ask(made, 2, None), Claim)


def test_a_late_queue_gives_up_what_is_worth_least_not_the_newest() -> None:
    made = admission(queue_age_s=2.0)
    queue = [write(made, number, value) for number, value in enumerate([0.1, 5.0, 1.0, 3.0, None])]
    assert made.crowded_out(queue, 0.0) is None, "nothing is late yet"
    made.tick(NOW + 2.5)
    assert made.crowded_out(queue, 4.0) is queue[2], "the oldest is being written"
    assert made.crowded_out(queue, None) is queue[2]
    assert made.crowded_out(queue, 1.0) is PutResult.QUEUE_AGE, "the one that is there stays"
    queue[2].entry.pins = 1
    assert made.crowded_out(queue, 4.0) is queue[3], "somebody reads it from memory"
    queue[3].abandoned = DropReason.REMOVED
    assert made.crowded_out(queue, 4.0) is PutResult.QUEUE_AGE
    assert made.crowded_out(queue[:1], None) is PutResult.QUEUE_AGE


def test_the_wait_is_measured_from_agreed_times() -> None:
    made = admission(queue_age_s=2.0)
    queue = [write(made, number, 1.0, queued=number > 0) for number in range(12)]
    for step in range(1, 5):
        made.tick(NOW + 0.3 * step)
        done = queue.pop(0)
        made.committed([done], queued=True)
        write(made, 100 + step, 1.0)
    assert made.wait_s(queue) == pytest.approx(8 * 0.3)
    assert made.crowded_out(queue, 2.0) is queue[1]
    assert made.crowded_out(queue[:6], 2.0) is None


def test_abandoned_writes_take_no_time() -> None:
    made = admission(queue_age_s=2.0)
    queue = [write(made, number, 1.0, queued=number > 0) for number in range(9)]
    for step in range(1, 4):
        made.tick(NOW + 0.3 * step)
        made.committed([queue.pop(0)], queued=True)
    for one in queue:
        one.abandoned = DropReason.ABORTED
    assert made.wait_s(queue) == pytest.approx(0.9), "only the age of the oldest counts"
    made.tick(NOW + 3)
    made.committed(queue, queued=False)
    assert made.wait_s([]) == 0
