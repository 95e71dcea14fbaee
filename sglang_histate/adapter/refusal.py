"""Refusals: one sentence that names the flag, the value and the way out, and exit code 2. No traceback.

A refusal that only a scheduler process can find out travels to the launcher through a small file, because SGLang
reports a dead scheduler by its exit alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

REFUSAL_VARIABLE = "HISTATE_REFUSAL_FILE"
EXIT_CODE = 2


class Refusal(Exception):
    """HiState cannot serve with these flags or this model."""


def open_mailbox() -> Path:
    """Create the file through which child processes report; its path goes into their environment."""
    handle, name = tempfile.mkstemp(prefix="histate-refusal-")
    os.close(handle)
    os.environ[REFUSAL_VARIABLE] = name
    return Path(name)


def leave_message(sentence: str) -> None:
    """Called in a child process that is about to exit because of a refusal."""
    name = os.environ.get(REFUSAL_VARIABLE)
    if name:
        Path(name).write_text(sentence, encoding="utf-8")


def read_message(mailbox: Path) -> str:
    """Return the sentence that a child left, or an empty string; the file is removed."""
    try:
        return mailbox.read_text(encoding="utf-8").strip()
    finally:
        mailbox.unlink(missing_ok=True)
