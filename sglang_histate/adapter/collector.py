"""Python's garbage collector while a server process starts.

SGLang and what it needs are some thousands of modules, and a collection after every few hundred new objects takes about a
fifth of the time to import them, in each of at least three processes.
"""

from __future__ import annotations

import gc

_WHILE_IMPORTING = 100_000
"""New objects before a collection. Not never: a process that forgets to call `restore` must not grow for ever."""

_usual: tuple[int, int, int] | None = None


def relax() -> None:
    """Collect seldom, until `restore`. Called before anything heavy is imported."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(_WHILE_IMPORTING, *_usual[1:])


def restore() -> None:
    """Collect as before `relax`; nothing if that was not called."""
    global _usual
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None
