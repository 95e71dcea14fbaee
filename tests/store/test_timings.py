"""How long the disk takes, by kind and by what it was: the wait and the work."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.store import SECONDS, Distribution, RecordKind
from sglang_histate.store.operations import Probe
from sglang_histate.store.reasons import MissReason
from sglang_histate.store.timings import Timings

from .conftest import key, open_store, put, put_extent, settle
from .fakes import FakeDisk

values = st.floats(0, 100, allow_nan=False)


@given(st.lists(values, max_size=50))
def test_a_distribution_counts_every_value_once(seen) -> None:
    spread = Distribution()
    heard: list[float] = []
    spread.heard = heard.append
    for value in seen:
        spread.add(value)
    found = spread.as_json()
    assert found["count"] == spread.count == len(seen) and heard == seen
    assert found["sum"] == pytest.approx(sum(seen))
    for bound in SECONDS:
        assert found["buckets"][str(bound)] == sum(value <= bound for value in seen)
    assert found["buckets"]["+Inf"] == len(seen)


def test_a_clock_that_went_back_takes_nothing_away() -> None:
    spread = Distribution((1.0,))
    spread.add(-5.0)
    assert (spread.sum, spread.counts) == (0.0, [1, 0])


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0)])
def test_bounds_ascend(bounds) -> None:
    with pytest.raises(AssertionError):
        Distribution(bounds)


def test_a_task_that_was_given_up_before_it_began_only_waited() -> None:
    timings = Timings()
    hung, worked = Probe(0, lambda ok: None), Probe(0, lambda ok: None)
    assert hung.give_up(MissReason.TIMED_OUT)
    assert worked.begin()
    worked.finish(None)
    for task in (hung, worked):
        timings.add_read(task)
    assert (timings.read_wait.count, timings.read.count) == (2, 1)
    assert timings.write.count == timings.write_wait.count == 0


def test_what_went_to_the_disk_is_timed() -> None:
    """A read that is served from memory takes no time of the disk; one that the disk holds up takes at least that."""
    disk = FakeDisk()
    store = open_store(disk=disk)
    disk.writes_allowed.clear()
    put(store, 1)
    shared = store.begin_read(key(1))
    time.sleep(0.02)
    disk.writes_allowed.set()
    settle(store)
    store.release(shared)
    checkpoints = store.stats().kinds[RecordKind.CHECKPOINT].timings
    assert checkpoints.write.count == checkpoints.write_wait.count == 1 and checkpoints.write.sum >= 0.02
    assert checkpoints.read.count == 0
    store.release(store_read(store))
    put_extent(store, 2)
    settle(store)
    extents = store.stats().kinds[RecordKind.KV].timings
    assert (checkpoints.read.count, checkpoints.write.count) == (1, 1)
    assert (extents.read.count, extents.write.count) == (0, 1)
    store.close()


def store_read(store):
    ticket = store.begin_read(key(1))
    settle(store)
    assert ticket.ok
    return ticket
