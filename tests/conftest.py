"""For all tests: how property tests are judged, and what one worker of several does.

A worker of pytest-xdist takes whole groups: the tests that share a server, else those of a file. Groups with servers come
first, so that the many short ones even out at the end.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Property tests are judged by what they find, not by how busy the machine is.
settings.register_profile("busy-machines", deadline=None)
settings.load_profile("busy-machines")


@pytest.hookimpl(tryfirst=True)  # after the folders' own, before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups say nothing where pytest and pytest-xdist do not fit each other, and take twice the time."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                "pytest-xdist does not keep groups of tests on one worker with this pytest: install the versions of pyproject.toml"
            )
