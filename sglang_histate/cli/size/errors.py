"""What `histate size` refuses."""

from __future__ import annotations


class SizeError(ValueError):
    """A deployment cannot be sized. The message is one sentence that names the flag and the way out."""
