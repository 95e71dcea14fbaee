"""docs/flags.md: HiState's flags of the server, and the commands of `histate`, as their parsers have them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sglang_histate.cli import parser_of_all
from sglang_histate.config import FLAG_DEFAULTS, TAKES_BACK, TAKES_BACK_HELP, flag_name
from sglang_histate.flag_help import FLAG_HELP
from sglang_histate.policy.interval import DEFAULT_INTERVALS, NO_INTERVAL

_HEAD = """# Flags

Made from the parsers by `python -m eval.handbook`; a test fails where it is not up to date.

## Of the server

`python -m sglang_histate.launch_server` takes these beside all of SGLang's own, which keep their meaning. They are a group
of their own in its `--help`, and may stand in SGLang's `--config FILE`. Reasons for the defaults are with the fields of
`sglang_histate/config.py`; what the launcher adds by itself: [operations.md](operations.md#start).
"""


def page() -> str:
    """Return the page."""
    lines = [_HEAD, "| flag | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{flag_name(name)}` | {spoken_default(name)} | {_cell(FLAG_HELP[name])} |"
        for name in FLAG_DEFAULTS
    ]
    lines += [
        f"| `{option}` | | {TAKES_BACK_HELP.format(flag_name(name))} |" for option, name in TAKES_BACK.items()
    ]
    lines += ["", "## Of `histate`", ""]
    for parser in _leaves(parser_of_all()):
        lines += [f"### `{parser.prog}`", "", f"{parser.description}", ""]
        lines += _table(parser)
        example = _example(parser)
        if example:
            lines += ["```", *example, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def spoken_default(name: str) -> str:
    """Return the default of a server flag in words."""
    default = FLAG_DEFAULTS[name]
    if name == "histate_intervals":
        return ",".join("none" if one == NO_INTERVAL else str(one) for one in DEFAULT_INTERVALS)
    if name == "histate_ssd_dir":
        return "none, required"
    return "none" if default is None else "off" if default is False else str(default)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield every command that does something, in the order of the help."""
    children = [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]
    if not children:
        yield parser
    for child in children:
        yield from _leaves(child)


def _table(parser: argparse.ArgumentParser) -> list[str]:
    actions = [action for action in parser._actions if action.dest != "help"]
    if not actions:
        return []
    rows = [f"| {_spelling(action)} | {_cell(action.help or '')} |" for action in actions]
    return ["| argument | meaning; default in brackets |", "|---|---|", *rows, ""]


def _spelling(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        choices = "|".join(map(str, action.choices)) if action.choices else None
        value = str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return f"`[{value}]`" if action.nargs == "?" else f"`{value}`"
    text = f"`{' '.join(part for part in (action.option_strings[-1], value) if part)}`".replace("|", "\\|")
    return f"{text}, required" if action.required else text


def _example(parser: argparse.ArgumentParser) -> list[str]:
    """Return the lines of the epilog that are command lines."""
    return [
        line.strip()
        for line in (parser.epilog or "").splitlines()
        if line.startswith("  ") and "histate" in line
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").replace("|", "\\|").split())
