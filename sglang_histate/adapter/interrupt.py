"""Ctrl-C ends the server as SIGTERM does, so that what only the host has is saved for the next start.

A terminal sends SIGINT to every process of the server at once. By default the schedulers die of it where they stand, and
the HTTP server kills whoever is left. So only the process that a person started listens, and hands it on as SIGTERM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a server that was told to end at once."""
_FIRST = (
    "HiState: ending as on SIGTERM: running requests end, then what only the host has is written to the SSD. This takes "
    "some seconds; Ctrl-C again ends at once, without that.\n"
)


def leave_it_to_the_parent() -> None:
    """In a process that the server has spawned: do not die of a SIGINT that the terminal sends to all."""
    spawned = multiprocessing.parent_process() is not None
    if spawned and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_gracefully_while_serving(app: Any) -> None:
    """Take SIGINT from the HTTP server once it has installed its own handlers, until it ends."""
    router = app.router
    outer = router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with outer(served) as state:
            # With several HTTP workers their supervisor listens, and there is no handler of SIGTERM to hand over to.
            if getattr(served, "is_single_tokenizer_mode", False):
                signal.signal(signal.SIGINT, _hand_over)
            yield state

    router.lifespan_context = lifespan


def _hand_over(number: int, frame: object) -> None:
    signal.signal(signal.SIGINT, _end_at_once)
    os.write(2, _FIRST.encode())  # logging takes locks, which the interrupted code may hold
    os.kill(os.getpid(), signal.SIGTERM)


def _end_at_once(number: int, frame: object) -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False, wait_timeout=None)
    os._exit(INTERRUPTED)
