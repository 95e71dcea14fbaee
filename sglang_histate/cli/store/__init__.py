"""`histate store`: what lies in the directories of ``--histate-ssd-dir``, with or without a server on them.

One module per action. None of them imports torch or sglang, and what is heavy is imported when an action runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_histate.cli.store import inspect, provision, purge, stats, verify

ACTIONS = (inspect, verify, purge, provision, stats)

_EPILOG = """examples:
  histate store inspect --ssd-dir /nvme/histate
  histate store verify --ssd-dir /nvme/histate --rate 200MiB
  histate store purge --ssd-dir /nvme/histate --salt tenant-7 --url http://127.0.0.1:30000

exit codes: 0 all is well; 1 something is wrong or could not be done, said in one sentence; 2 bad usage.
All actions work on several directories at once (--ssd-dir A,B) and never touch what is of another format version or
of somebody else."""


def register(subparsers: Any) -> None:
    """Add the command and its actions to the parser of `histate`."""
    parser = subparsers.add_parser(
        "store",
        help="inspect, verify, purge and provision the SSD tier",
        description="What lies in the directories of --histate-ssd-dir, with or without a server on them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        action.register(actions)
