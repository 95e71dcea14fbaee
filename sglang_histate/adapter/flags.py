"""HiState's flags as SGLang server arguments: their group in ``--help`` and the way back to one config."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_histate.config import (
    FLAG_DEFAULTS,
    TAKES_BACK,
    TAKES_BACK_HELP,
    HiStateConfig,
    config_from_flags,
    flag_name,
)


def group_flags(parser: argparse.ArgumentParser) -> None:
    """Move HiState's arguments, which SGLang registered with its own, into a group of their own."""
    group = parser.add_argument_group("HiState", "Hierarchical prefix cache for hybrid models.")
    for action in list(parser._optionals._group_actions):
        if action.dest in FLAG_DEFAULTS:
            parser._optionals._group_actions.remove(action)
            group._group_actions.append(action)
    for option, name in TAKES_BACK.items():
        group.add_argument(
            option,
            dest=name,
            action="store_false",
            default=FLAG_DEFAULTS[name],
            help=TAKES_BACK_HELP.format(flag_name(name)),
        )


def config_of(server_args: Any) -> HiStateConfig:
    """Build the settings from parsed server arguments.

    Raises:
        ConfigError: one sentence that names the flag.
    """
    return config_from_flags({name: getattr(server_args, name) for name in FLAG_DEFAULTS})
