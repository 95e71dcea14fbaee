"""Process 1 of the container: runs the server as its child, hands signals on, collects orphans, ends as the server did.

A process that is number 1 cannot kill itself, and SGLang ends by killing itself when a scheduler has died: as number 1 it
would end with exit code 0, and nothing would start it again. As a child it ends with a signal, which is 128 + n here.

Exit code: the server's; 128 + n if signal n ended it; 1 if it ended well although nobody asked it to; as of a shell, 127
if there is no such command and 126 if it cannot be run. Standard library only, any Python from 3.11 on.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def main(command: list[str]) -> int:
    """Run `command` until it ends, and return the exit code for it."""
    if not command:
        print("usage: init.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    asked_to_end = False
    child = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end = asked_to_end or number in _ENDS
        if child:  # there until it is collected below, and its number nobody else's
            os.kill(child, number)

    # What comes before the child is there waits in the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    for number in _FORWARDED:
        signal.signal(number, hand_on)
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=[], setsigdef=[*_FORWARDED, signal.SIGPIPE]
        )
    except OSError as error:
        print(f"init: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        # Orphans of the server become children of process 1; whatever ends is collected here.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid == child:
            break
        os.waitpid(ended.si_pid, 0)
    # A signal that comes now has nobody to go to.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"init: the server was ended by {_name(-code)}", file=sys.stderr, flush=True)
        return 128 - code
    if code == 0 and not asked_to_end:
        print("init: the server ended although nobody asked it to", file=sys.stderr, flush=True)
        return 1
    return code


def _name(number: int) -> str:
    """Return a signal's name; those of real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
