"""The garbage collector is slowed down while a server process imports, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sglang_histate.adapter import collector, plugin


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[int, int, int]]:
    collector.restore()  # who imported the server in this process has relaxed it
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)


def test_relaxed_until_the_plugins_are_loaded(before: tuple[int, int, int]) -> None:
    collector.relax()
    collector.relax()
    assert gc.get_threshold()[0] > 10 * before[0] and gc.isenabled()
    plugin.register()
    assert gc.get_threshold() == before


def test_restoring_twice_changes_nothing_that_somebody_set_since() -> None:
    collector.relax()
    collector.restore()
    gc.set_threshold(5, 6, 7)
    collector.restore()
    assert gc.get_threshold() == (5, 6, 7)
