"""The container's health check: exit code 0 if the server answers /health where process 1's command line says it is."""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path

_TIMEOUT_S = 10.0


def option(words: list[str], flag: str) -> str | None:
    """Return the last value of `flag` on a command line."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else words[at + 1]
    return found


def url_of(words: list[str]) -> str:
    """Return where a server with this command line answers; SGLang's own defaults for what is not there."""
    host = option(words, "--host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if option(words, "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{option(words, '--port') or '30000'}/health"


def main(process: str = "1") -> int:
    words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0")
    try:
        # The certificate is for the name that clients use; this asks whether anybody answers.
        context = ssl._create_unverified_context()
        with urllib.request.urlopen(url_of(words), timeout=_TIMEOUT_S, context=context):
            return 0
    except OSError as error:  # refused, timed out, or an answer that is no success
        print(f"not healthy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
