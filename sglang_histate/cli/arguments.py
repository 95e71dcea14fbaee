"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def size_bytes(text: str) -> int:
    """Bytes, such as 512MiB."""
    from sglang_histate.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
