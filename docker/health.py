"""The container's health check: exit code 0 if the server answers /health, at the port of process 1's command line."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

_TIMEOUT_S = 10.0


def port_of(words: list[str]) -> int:
    """Return the last --port of a command line, SGLang's own default without one."""
    found = "30000"
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--port":
            found = value if equals else words[at + 1]
    return int(found)


def main(process: str = "1") -> int:
    words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port_of(words)}/health", timeout=_TIMEOUT_S):
            return 0
    except OSError as error:  # refused, timed out, or an answer that is no success
        print(f"not healthy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
