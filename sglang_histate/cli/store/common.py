"""What the actions of `histate store` share: directories, open files, progress, the server behind a live store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_histate.store.survey import SlabFile

KEY_VARIABLE = "HISTATE_ADMIN_API_KEY"
_EXIT_CODES = "exit codes: 0 all is well, 1 something is wrong or could not be done, 2 bad usage"


def add_action(actions: Any, name: str, help_text: str, example: str) -> argparse.ArgumentParser:
    """Add an action with its example and the flag that all have."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=f"example:\n  {example}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ssd-dir",
        required=True,
        metavar="DIR[,DIR...]",
        type=_directories,
        help="as --histate-ssd-dir of the server",
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_server(parser: argparse.ArgumentParser, what_for: str, url: str | None = None) -> None:
    """Add the flags that name a server and its key; `url` is the server to ask if none is named."""
    parser.add_argument("--url", metavar="URL", default=url, help=f"the running server {what_for}")
    parser.add_argument(
        "--admin-api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE),
        help=f"the server's --admin-api-key, or --api-key if it has no other (default: {KEY_VARIABLE}, which others "
        "on this machine cannot read from the process list)",
    )


def _directories(text: str) -> list[Path]:
    names = text.split(",")
    if not all(names) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no directory or one twice")
    return [Path(name) for name in names]


def open_files(root: Path, flags: int, refuse: Callable[[str], None]) -> Iterator[SlabFile]:
    """Yield each slab file below `root` while it is open; `refuse` hears of those that cannot be opened.

    Raises:
        StoreError: `root` cannot be read.
    """
    from sglang_histate.store.reasons import StoreError
    from sglang_histate.store.survey import SlabFile, survey

    for path in survey(root).files:
        try:
            file = SlabFile.open(root, path, flags)
        except StoreError as error:
            refuse(str(error))
            continue
        except FileNotFoundError:
            continue  # purged meanwhile
        with file:
            yield file


def complain(text: str) -> None:
    print(f"histate: {text}", file=sys.stderr)


def ask_server(
    arguments: argparse.Namespace, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """GET or, with a `body`, POST JSON.

    Raises:
        StoreError: no answer, or not the wanted one.
    """
    import http.client
    import urllib.error
    import urllib.request

    from sglang_histate.store.reasons import StoreError

    url = arguments.url.rstrip("/") + path
    try:
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if arguments.admin_api_key:
            request.add_header("Authorization", f"Bearer {arguments.admin_api_key}")
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise StoreError(
                f"{arguments.url} refuses the key: give its --admin-api-key in {KEY_VARIABLE}"
            ) from None
        detail = error.read(500).decode(errors="replace")
        raise StoreError(_sentence(detail) or f"{url} answered {error.code}: {detail}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)).strip()
        raise StoreError(
            f"{arguments.url} cannot be asked ({reason}): is the server up, and is that its address?"
        ) from None
    if not isinstance(found, dict) or not found.get("enabled", True):
        raise StoreError(f"{arguments.url} serves without HiState")
    return found


def _sentence(detail: str) -> str | None:
    """Return what a refusal of one of HiState's own routes says, None if it is somebody else's."""
    try:
        found = json.loads(detail)
    except ValueError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, str) else None


def held_by(file: SlabFile) -> str:
    """Say who has the file open."""
    return f"process {file.holder}" if file.holder else "a process that cannot be seen from here"
