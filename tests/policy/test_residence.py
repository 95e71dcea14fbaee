import pytest

from sglang_histate.policy.residence import MAX_PRESSURE, MIN_PRESSURE, Residence, ResidenceTime


def test_nothing_is_known_without_an_eviction_or_an_entry() -> None:
    assert ResidenceTime().mean(now=50, oldest=None) is None
    assert Residence().pressure(now=50, oldest_kv=None, oldest_state=None) == 1.0


def test_cold_start_takes_the_age_of_the_oldest_entry() -> None:
    assert ResidenceTime().mean(now=50, oldest=10) == 40
    assert Residence().pressure(now=50, oldest_kv=10, oldest_state=30) == 2.0


def test_one_unknown_side_is_no_pressure() -> None:
    residence = Residence()
    residence.kv.evicted(entered=0, now=500)
    assert residence.pressure(now=500, oldest_kv=0, oldest_state=None) == 1.0


def test_the_first_eviction_is_the_average_and_later_ones_move_it_by_a_32nd() -> None:
    time = ResidenceTime()
    time.evicted(entered=0, now=100)
    assert time.mean(now=100, oldest=0) == 100
    time.evicted(entered=0, now=132)
    assert time.mean(now=132, oldest=0) == 101


def test_an_old_entry_in_use_does_not_count_once_others_were_evicted() -> None:
    time = ResidenceTime()
    time.evicted(entered=990, now=1000)
    assert time.mean(now=1000, oldest=0) == 10


def test_a_pause_without_evictions_is_a_lower_bound() -> None:
    time = ResidenceTime()
    time.evicted(entered=90, now=100)
    assert time.mean(now=105, oldest=0) == 10
    assert time.mean(now=600, oldest=0) == 500


def test_pressure_is_bounded_both_ways() -> None:
    residence = Residence()
    residence.kv.evicted(entered=0, now=1000)
    residence.state.evicted(entered=1000, now=1000)
    assert residence.pressure(now=1000, oldest_kv=None, oldest_state=None) == MAX_PRESSURE
    other = Residence()
    other.kv.evicted(entered=999, now=1000)
    other.state.evicted(entered=0, now=1000)
    assert other.pressure(now=1000, oldest_kv=None, oldest_state=None) == MIN_PRESSURE


def test_two_times_of_zero_are_equal() -> None:
    assert Residence().pressure(now=7, oldest_kv=7, oldest_state=7) == 1.0


def test_an_entry_cannot_leave_before_it_came() -> None:
    with pytest.raises(ValueError, match="came at 5 cannot be evicted at 4"):
        ResidenceTime().evicted(entered=5, now=4)
