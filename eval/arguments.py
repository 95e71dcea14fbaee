"""Types of command-line arguments that the measurements share."""

from __future__ import annotations

import argparse

from sglang_histate.sizes import parse_size


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def size_bytes(text: str) -> int:
    """Bytes, such as 512MiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
