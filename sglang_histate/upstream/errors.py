"""The one error of this package."""

from __future__ import annotations


class UpstreamError(Exception):
    """The installed SGLang, a patch or the overlay is not as required. The message is one printable
    sentence.
    """
