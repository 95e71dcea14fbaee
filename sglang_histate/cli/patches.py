"""`histate patches`: list, check, diff, export and record the patch set."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_histate.upstream.series import Patch


def register(subparsers: Any) -> None:
    """Add the command and its actions to the parser of `histate`."""
    parser = subparsers.add_parser("patches", help="list, check and export the patches on SGLang")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    action = actions.add_parser("list", help="the patches in order, with what they are for")
    action.set_defaults(run=_list)

    action = actions.add_parser("check", help="run every gate; exit code 1 names what to re-read")
    _add_root(action)
    action.set_defaults(run=_check)

    action = actions.add_parser(
        "diff", help="print one patch, or all as one diff against the pristine release"
    )
    action.add_argument("name", nargs="?", help="a patch from the list, with or without .patch")
    _add_root(action)
    action.set_defaults(run=_diff)

    action = actions.add_parser(
        "export", help="write the patches, the pristine and the patched files as a tree"
    )
    action.add_argument(
        "directory", type=Path, metavar="DIR", help="a folder that does not exist or is empty"
    )
    _add_root(action)
    action.set_defaults(run=_export)

    action = actions.add_parser(
        "record", help="record the hashes of the upstream functions in use, after reading"
    )
    _add_root(action)
    action.set_defaults(run=_record)


def _add_root(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="a folder that holds sglang/ (default: the installed release)",
    )


def _list(arguments: argparse.Namespace) -> int:
    for patch in _all_patches():
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
        patches = _all_patches()
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


def _all_patches() -> list[Patch]:
    from sglang_histate.upstream import series
    from sglang_histate.upstream.locations import patches_dir

    folder = patches_dir()
    present = [group for group in series.GROUPS if (folder / group / "series").is_file()]
    return [patch for group in present for patch in series.read_group(group, folder)]
