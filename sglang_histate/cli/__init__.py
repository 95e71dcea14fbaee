"""The `histate` command. One module per subcommand; each has `register(subparsers)` and imports what is
heavy late.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import sglang_histate
from sglang_histate.cli import doctor, explain, patches, size, store

COMMANDS = (doctor, explain, size, store, patches)


_EPILOG = """examples:
  histate doctor --ssd-dir /nvme/histate
  histate explain
  histate size --model /models/Qwen3.5-9B --device 80GiB --host 256GiB --ssd 2TiB
  histate store inspect --ssd-dir /nvme/histate
  histate patches check

The server itself is python -m sglang_histate.launch_server; its HiState flags are a group of its --help.
exit codes: 0 all is well; 1 a check failed or the work could not be done, said in one sentence; 2 bad usage"""


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="histate",
        description=sglang_histate.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"histate {sglang_histate.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 if a check failed or the command could not do its work, 2 for bad usage. Failures are
        one sentence on stderr.
    """
    parser = parser_of_all()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its sentence; a caller of main wants the code
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        sys.stderr.close()
        return 1
    except Exception as error:
        if not isinstance(error, _expected_errors()):
            raise
        print(f"histate: {error}", file=sys.stderr)
        return 1


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors whose text is a sentence for the user; imported late to keep ``--help`` instant."""
    from sglang_histate.cli.size.errors import SizeError
    from sglang_histate.store.reasons import StoreError
    from sglang_histate.upstream.errors import UpstreamError

    return UpstreamError, StoreError, SizeError, OSError
