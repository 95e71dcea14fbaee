"""Code whose results only people see: a fault in it is logged and ends there, instead of ending a server that works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def for_people(what: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result | None]]:
    """Return a decorator for a function that decides nothing and asks no other rank: it returns None after a fault.

    `what` fails, says the log, with a traceback the first time that a place raises: it may be called in each step.
    """

    def decorate(call: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
        told: set[tuple[str, int]] = set()

        @wraps(call)
        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                place = _place(error)
                if place not in told:
                    told.add(place)
                    logger.exception("HiState: %s failed; requests are served as before", what)
                return None

        return guarded

    return decorate


def _place(error: Exception) -> tuple[str, int]:
    """Return the file and line that raised."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
