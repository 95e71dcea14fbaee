"""Unified diffs: parse, apply, reverse. Strict on purpose, and without a `patch` binary, which slim images
lack.

Zero fuzz and zero offset: every context and removed line must be found exactly at the line that the hunk
header names in the file before the patch. A patch changes existing text files; it neither creates, deletes
nor renames. Lines are split at "\\n" only and keep it, so that a round trip is exact to the byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_histate.upstream.errors import UpstreamError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"
_IGNORED = ("diff ", "index ")


@dataclass(frozen=True)
class Hunk:
    """One change. `lines` are (tag, text) with tag " ", "-" or "+"; starts count from 1, as in the header."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[tuple[str, str], ...]

    def reversed(self) -> Hunk:
        """Return the hunk that undoes this one."""
        swap = {"+": "-", "-": "+", " ": " "}
        lines = tuple((swap[tag], text) for tag, text in self.lines)
        return Hunk(self.new_start, self.new_count, self.old_start, self.old_count, lines)


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one file; `path` is relative to the folder that holds the package, such as
    ``sglang/a.py``.
    """

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        """Return the diff that undoes this one."""
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))


def split_lines(text: str) -> list[str]:
    """Split at "\\n" and keep it; unlike str.splitlines, form feeds and lone carriage returns are ordinary
    text.
    """
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def parse(text: str, name: str, first_line: int = 1) -> tuple[FileDiff, ...]:
    """Parse the diff part of a patch.

    Args:
        text: from the first ``---`` (or ``diff``) line on.
        name: how errors call the patch.
        first_line: the number of `text`'s first line in the patch file, for errors.

    Raises:
        UpstreamError: anything that is not a well-formed change of existing files.
    """
    rows = text.split("\n")
    if rows and rows[-1] == "":
        rows.pop()
    diffs: list[FileDiff] = []
    at = 0
    while at < len(rows):
        if rows[at].startswith(_IGNORED):
            at += 1
            continue
        path = _header_path(rows, at, name, first_line)
        if any(diff.path == path for diff in diffs):
            raise UpstreamError(f"{name} line {first_line + at}: {path} appears twice in one patch")
        at += 2
        hunks: list[Hunk] = []
        while at < len(rows) and rows[at].startswith("@@"):
            hunk, at = _parse_hunk(rows, at, f"{name} line {first_line + at}")
            hunks.append(hunk)
        _check_order(hunks, path, name)
        diffs.append(FileDiff(path, tuple(hunks)))
    if not diffs:
        raise UpstreamError(f"{name} contains no diff")
    return tuple(diffs)


def apply(diff: FileDiff, source: str, name: str) -> str:
    """Return `source` after `diff`.

    Raises:
        UpstreamError: a hunk does not match; the sentence names patch, file, hunk and line.
    """
    old = split_lines(source)
    new: list[str] = []
    done = 0  # lines of `old` that are already in `new`
    for number, hunk in enumerate(diff.hunks, 1):
        start = hunk.old_start - 1 if hunk.old_count else hunk.old_start
        new += old[done:start]
        at = start
        for tag, text in hunk.lines:
            if tag != "+":
                found = old[at] if at < len(old) else None
                if found != text:
                    shown = "the end of the file" if found is None else repr(found)
                    raise UpstreamError(
                        f"{name} does not apply: hunk {number} of {diff.path} wants {text!r} "
                        f"at line {at + 1} but finds {shown}"
                    )
                at += 1
            if tag != "-":
                new.append(text)
        done = at
    return "".join(new + old[done:])


def _header_path(rows: list[str], at: int, name: str, first_line: int) -> str:
    """Return the path that the two header lines at `at` name."""
    where = f"{name} line {first_line + at}"
    if not rows[at].startswith("--- ") or at + 1 >= len(rows) or not rows[at + 1].startswith("+++ "):
        raise UpstreamError(f"{where}: expected a pair of --- and +++ lines, found {rows[at]!r}")
    old, new = (row[4:].split("\t")[0].rstrip() for row in rows[at : at + 2])
    if "/dev/null" in (old, new):
        raise UpstreamError(
            f"{where}: a patch may only change existing files, new files belong to sglang_histate"
        )
    path = old[2:]
    if not old.startswith("a/sglang/") or new != "b/" + path or ".." in path.split("/"):
        raise UpstreamError(
            f"{where}: paths must be a/sglang/... and b/sglang/... of the same file, found {old!r}"
        )
    return path


def _parse_hunk(rows: list[str], at: int, where: str) -> tuple[Hunk, int]:
    """Return the hunk whose header is `rows[at]` and the index after it."""
    match = _HUNK.match(rows[at])
    if match is None:
        raise UpstreamError(f"{where}: not a hunk header: {rows[at]!r}")
    old_start, old_count, new_start, new_count = (
        1 if group is None else int(group) for group in match.groups()
    )
    old_left, new_left = old_count, new_count
    lines: list[tuple[str, str]] = []
    at += 1
    while old_left > 0 or new_left > 0 or (at < len(rows) and rows[at] == _NO_NEWLINE):
        row = rows[at] if at < len(rows) else "@@"
        if row == _NO_NEWLINE:
            if not lines or not lines[-1][1].endswith("\n"):
                raise UpstreamError(f"{where}: misplaced {_NO_NEWLINE!r}")
            lines[-1] = (lines[-1][0], lines[-1][1][:-1])
            at += 1
            continue
        tag = row[:1]
        if tag not in ("+", "-", " "):
            hint = (
                "an empty context line needs its leading space" if row == "" else "the line counts are wrong"
            )
            raise UpstreamError(f"{where}: the hunk ends early ({hint})")
        old_left -= tag != "+"
        new_left -= tag != "-"
        lines.append((tag, row[1:] + "\n"))
        at += 1
    if old_left or new_left:
        raise UpstreamError(f"{where}: the hunk's lines do not add up to its header")
    if at < len(rows) and rows[at][:1] in ("+", "-", " ") and not rows[at].startswith("--- "):
        raise UpstreamError(f"{where}: the hunk has more lines than its header says")
    return Hunk(old_start, old_count, new_start, new_count, tuple(lines)), at


def _check_order(hunks: list[Hunk], path: str, name: str) -> None:
    """Hunks must ascend, and each new start must be the old one plus what the earlier hunks added."""
    if not hunks:
        raise UpstreamError(f"{name}: {path} has no hunks")
    delta = end = 0
    for number, hunk in enumerate(hunks, 1):
        old = hunk.old_start - 1 if hunk.old_count else hunk.old_start
        new = hunk.new_start - 1 if hunk.new_count else hunk.new_start
        if old < end or new != old + delta:
            raise UpstreamError(
                f"{name}: hunk {number} of {path} (line {hunk.old_start}) "
                "does not follow from the hunks before it"
            )
        end = old + hunk.old_count
        delta += hunk.new_count - hunk.old_count
