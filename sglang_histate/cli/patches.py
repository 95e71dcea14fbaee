"""`histate patches`: list, check, diff, export, record and build the patch set."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_histate.upstream.series import Patch


_EPILOG = """examples:
  histate patches list                      what is changed, and why
  histate patches check                     is the installed release the one they were made for, and nothing else changed
  histate patches check --root NEW/         what has to be read again for another release
exit codes: 0 all is well; 1 a gate failed; 2 bad usage"""


def register(subparsers: Any) -> None:
    """Add the command and its actions to the parser of `histate`."""
    parser = subparsers.add_parser(
        "patches",
        help="list, check, export and build the patches on SGLang",
        description="What is changed in SGLang, and whether it still fits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    action = _add(actions, "list", "the patches in order, with what they are for", "histate patches list")
    action.set_defaults(run=_list)

    action = _add(
        actions,
        "check",
        "run every gate; exit code 1 names what to re-read",
        "histate patches check --root NEW",
    )
    _add_root(action)
    action.set_defaults(run=_check)

    action = _add(
        actions,
        "diff",
        "print one patch, or all as one diff against the pristine release",
        "histate patches diff fault-in-gate",
    )
    action.add_argument("name", nargs="?", help="a patch from the list, with or without .patch")
    _add_root(action)
    action.set_defaults(run=_diff)

    action = _add(
        actions,
        "export",
        "write the patches, the pristine and the patched files as a tree",
        "histate patches export /tmp/histate-patches",
    )
    action.add_argument(
        "directory", type=Path, metavar="DIR", help="a folder that does not exist or is empty"
    )
    _add_root(action)
    action.set_defaults(run=_export)

    action = _add(
        actions,
        "record",
        "record the hashes of the upstream functions in use, after reading",
        "histate patches record",
    )
    _add_root(action)
    action.set_defaults(run=_record)

    action = _add(
        actions,
        "build",
        "build the patched view of SGLang that the first start would build, into HISTATE_CACHE_DIR",
        "HISTATE_CACHE_DIR=/opt/histate/cache histate patches build --gpu",
    )
    which = action.add_mutually_exclusive_group()
    which.add_argument(
        "--gpu",
        dest="gpu",
        action="store_true",
        default=None,
        help="for machines with a GPU (default: as this one)",
    )
    which.add_argument("--cpu", dest="gpu", action="store_false", help="for machines without one")
    action.set_defaults(run=_build)


def _add(actions: Any, name: str, help_text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_root(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="a folder that holds sglang/ (default: the installed release)",
    )


def _list(arguments: argparse.Namespace) -> int:
    for patch in all_patches():
        print(f"{patch.label}\n  {patch.header['Description']}\n  upstream: {patch.header['Upstream']}")
        for file_diff in patch.files:
            added = sum(tag == "+" for hunk in file_diff.hunks for tag, _ in hunk.lines)
            removed = sum(tag == "-" for hunk in file_diff.hunks for tag, _ in hunk.lines)
            print(f"  {file_diff.path}  +{added} -{removed}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from sglang_histate.upstream import gates

    subject = gates.Subject.default(arguments.root)
    failed = False
    for gate, findings in gates.run_all(subject):
        print(f"{'FAIL' if findings else 'ok  '}  {gate.title}")
        for finding in findings:
            print(f"      {finding}")
        failed = failed or bool(findings)
    return int(failed)


def _diff(arguments: argparse.Namespace) -> int:
    from sglang_histate.upstream import gates, tree

    if arguments.name is not None:
        patches = all_patches()
        wanted = arguments.name.removeprefix("patches/").removesuffix(".patch")
        for patch in patches:
            name = patch.name.removesuffix(".patch")
            if wanted in (name, f"{patch.group}/{name}"):
                print(patch.text, end="")
                return 0
        known = ", ".join(f"{patch.group}/{patch.name.removesuffix('.patch')}" for patch in patches)
        print(
            f"histate: there is no patch {arguments.name!r}: choose from {known or 'none'}", file=sys.stderr
        )
        return 2
    subject = gates.Subject.default(arguments.root)
    merged = tree.apply_groups([subject.patches(group) for group in subject.groups], subject.root)
    for path, (pristine, patched) in merged.items():
        print(tree.unified(path, pristine, patched), end="")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from sglang_histate.upstream import gates, tree

    subject = gates.Subject.default(arguments.root)
    target: Path = arguments.directory
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        print(f"histate: {target} exists and is not empty: choose another folder", file=sys.stderr)
        return 2
    merged = tree.apply_groups([subject.patches(group) for group in subject.groups], subject.root)
    for path, (pristine, patched) in merged.items():
        for side, text in (("pristine", pristine), ("patched", patched)):
            (target / side / path).parent.mkdir(parents=True, exist_ok=True)
            (target / side / path).write_bytes(text.encode())
    shutil.copytree(subject.folder, target / "patches")
    combined = "".join(tree.unified(path, *texts) for path, texts in merged.items())
    (target / "combined.patch").write_bytes(combined.encode())
    print(f"wrote {len(merged)} files to {target}: apply with patch -p1 < combined.patch beside sglang/")
    return 0


def _record(arguments: argparse.Namespace) -> int:
    from sglang_histate.upstream import gates

    path, count = gates.record(gates.Subject.default(arguments.root))
    print(f"recorded {count} upstream functions in {path}")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from sglang_histate.upstream import build_overlay, groups_for

    for histate in (True, False):  # the server's, and that of --disable-histate
        overlay = build_overlay(groups_for(histate, arguments.gpu))
        if overlay.path is not None:
            print(f"{', '.join(overlay.groups)}: {overlay.path}")
    return 0


def all_patches() -> list[Patch]:
    """Return the patches of all groups, in the order in which they are applied."""
    from sglang_histate.upstream import series
    from sglang_histate.upstream.locations import patches_dir

    folder = patches_dir()
    present = [group for group in series.GROUPS if (folder / group / "series").is_file()]
    return [patch for group in present for patch in series.read_group(group, folder)]
