"""Types of command-line arguments that the measurements share."""

from __future__ import annotations

import argparse
import textwrap

from sglang_histate.cli.arguments import size_bytes as size_bytes


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def with_examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Put command lines at the end of a parser's help; its own texts keep their line breaks only if they have some."""
    if parser.formatter_class is argparse.HelpFormatter:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description, parser.epilog = _filled(parser.description), _filled(parser.epilog)
    shown = "examples:\n" + "\n".join(f"  {command}" for command in commands)
    parser.epilog = f"{parser.epilog}\n\n{shown}" if parser.epilog else shown


def _filled(text: str | None) -> str | None:
    return None if text is None else textwrap.fill(" ".join(text.split()), 100, break_long_words=False)
