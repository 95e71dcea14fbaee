"""``python -m eval.handbook``: write docs/flags.md, docs/patches.md and docs/figures/*.svg anew from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from eval.handbook import flags, interval_figure, life_figure, patches, ranking_figure

DOCS = Path(__file__).resolve().parents[2] / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags.page,
    "patches.md": patches.page,
    "figures/interval.svg": interval_figure.picture,
    "figures/life.svg": life_figure.picture,
    "figures/ranking.svg": ranking_figure.picture,
}
"""What is made, by its name below docs/."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.handbook",
        description="Write the parts of the documentation that are made from the code.",
        epilog="examples:\n  python -m eval.handbook            after a flag or a patch has changed\n"
        "  python -m eval.handbook --check    exit code 1 names what is not up to date",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="the folder (docs)")
    arguments = parser.parse_args(argv)
    stale = []
    for name, make in PAGES.items():
        path, text = arguments.docs / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{'not up to date' if arguments.check else 'written'}: {name}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
