"""Patched sources in memory: what each file becomes when a choice of groups is applied to a pristine tree.

Every group is written against the pristine release and applies there alone, because a GPU machine takes only
``histate`` and a stock CPU run only ``cpu``. Where two groups change one file, both results are merged;
changes that overlap or touch are an error, never a guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from sglang_histate.upstream import diff
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.series import Patch

_Edit = tuple[int, int, list[str]]  # replace pristine lines [start, end) with these


def read_source(root: Path, path: str) -> str:
    """Return the text of `path` under `root` (the folder that holds ``sglang/``), newlines untouched."""
    try:
        return (root / path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UpstreamError(f"{path} is missing in the installed sglang: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UpstreamError(f"{path} is not UTF-8 text") from error


def apply_series(patches: Sequence[Patch], root: Path) -> dict[str, tuple[str, str]]:
    """Apply the patches of one group in order.

    Returns:
        path -> (pristine text, patched text).
    """
    result: dict[str, tuple[str, str]] = {}
    for patch in patches:
        for file_diff in patch.files:
            path = file_diff.path
            pristine, current = result[path] if path in result else (read_source(root, path),) * 2
            result[path] = (pristine, diff.apply(file_diff, current, patch.label))
    return result


def apply_groups(groups: Sequence[Sequence[Patch]], root: Path) -> dict[str, tuple[str, str]]:
    """Apply several groups, each against the pristine tree, and merge them per file.

    Returns:
        path -> (pristine text, patched text).

    Raises:
        UpstreamError: a patch does not apply, or two groups change the same or adjoining lines.
    """
    merged: dict[str, tuple[str, str]] = {}
    for patches in groups:
        for path, (pristine, patched) in apply_series(patches, root).items():
            if path not in merged:
                merged[path] = (pristine, patched)
                continue
            names = ", ".join(patch.label for patch in patches if any(f.path == path for f in patch.files))
            merged[path] = (pristine, _merge(pristine, merged[path][1], patched, f"{names} in {path}"))
    return dict(sorted(merged.items()))


def _merge(pristine: str, ours: str, theirs: str, where: str) -> str:
    base = diff.split_lines(pristine)
    edits = sorted(_edits(base, ours) + _edits(base, theirs), key=lambda edit: (edit[0], edit[1]))
    out: list[str] = []
    done = 0
    for index, (start, end, lines) in enumerate(edits):
        if index and start <= edits[index - 1][1]:
            raise UpstreamError(
                f"two groups change the pristine file at line {start + 1}: {where}; move one of them"
            )
        out += base[done:start] + lines
        done = end
    return "".join(out + base[done:])


def _edits(base: list[str], changed: str) -> list[_Edit]:
    lines = diff.split_lines(changed)
    matcher = difflib.SequenceMatcher(None, base, lines)
    return [(i, j, lines[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def unified(path: str, pristine: str, patched: str) -> str:
    """Return the unified diff of one file in the form that `diff.parse` reads."""
    out: list[str] = []
    rows = difflib.unified_diff(
        diff.split_lines(pristine), diff.split_lines(patched), "a/" + path, "b/" + path, lineterm="\n"
    )
    for row in rows:
        out.append(row if row.endswith("\n") else row + "\n\\ No newline at end of file\n")
    return "".join(out)
