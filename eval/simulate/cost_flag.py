"""``--cost NAME=VALUE``: a constant of the cost model on the command line, and the flags that make given costs again."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields

from eval.simulate.costs import Costs

HELP = ", ".join(f"{name}={value:g}" for name, value in asdict(Costs()).items())
"""All constants with their usual values."""


def constant(text: str) -> tuple[str, float]:
    """Return name and value; the type of an argument.

    Raises:
        ArgumentTypeError: there is no such constant, or the value is no number.
    """
    name, _, value = text.partition("=")
    kinds = {one.name: one.type for one in fields(Costs)}
    if name not in kinds:
        raise argparse.ArgumentTypeError(
            f"{name} is no constant of the cost model: they are {', '.join(kinds)}"
        )
    try:
        return name, int(value) if kinds[name] == "int" else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: {value!r} is no number") from None


def flags(costs: Costs) -> list[str]:
    """Return the words of a command line that make these costs of the usual ones, [] for those."""
    usual, words = asdict(Costs()), []
    for name, value in asdict(costs).items():
        if value != usual[name]:
            words += ["--cost", f"{name}={value!r}"]
    return words
