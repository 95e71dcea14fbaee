"""Which function or class of a source file encloses a line, and the hash of its source. Pure, on text.

A scope is a qualified name such as ``Scheduler.get_next_batch``. Lines of a class outside its methods are
``Scheduler.<body>``, lines outside every function and class are ``<module>``.
"""

from __future__ import annotations

import ast

from sglang_histate.upstream.diff import FileDiff, split_lines
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.locations import sha256

MODULE = "<module>"
_BODY = ".<body>"
_Def = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Scopes:
    """The scopes of one source file."""

    def __init__(self, source: str, path: str) -> None:
        """Args:
            source: the file's text.
            path: how errors call the file.

        Raises:
            UpstreamError: the file is not valid Python.
        """
        self._lines = split_lines(source)
        self._owner = [MODULE] * (len(self._lines) + 1)  # innermost scope of each line, counted from 1
        self._spans: dict[str, list[tuple[int, int]]] = {}  # property getters and setters share a name
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise UpstreamError(f"{path} is not valid Python at line {error.lineno}: {error.msg}") from error
        self._visit(tree, "")

    def of_line(self, line: int) -> str:
        """Return the innermost scope of `line` (from 1)."""
        return self._owner[line] if line < len(self._owner) else MODULE

    def __contains__(self, scope: str) -> bool:
        return scope == MODULE or scope.removesuffix(_BODY) in self._spans

    def digest(self, scope: str) -> str:
        """Return the sha256 of the source of `scope`; a class name alone means the whole class.

        Raises:
            KeyError: there is no such scope.
        """
        if scope == MODULE or scope.endswith(_BODY):
            chosen = [
                text for owner, text in zip(self._owner[1:], self._lines, strict=True) if owner == scope
            ]
            if scope != MODULE and scope.removesuffix(_BODY) not in self._spans:
                raise KeyError(scope)
        else:
            chosen = [text for start, end in self._spans[scope] for text in self._lines[start - 1 : end]]
        # Blank lines between functions belong to no one: a moved neighbour must not raise an alarm.
        return sha256("".join(text for text in chosen if text.strip()).encode())

    def _visit(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _Def):
                self._visit(child, prefix)
                continue
            name = prefix + child.name
            start = min([child.lineno] + [decorator.lineno for decorator in child.decorator_list])
            end = child.end_lineno or child.lineno
            self._spans.setdefault(name, []).append((start, end))
            owner = name + _BODY if isinstance(child, ast.ClassDef) else name
            self._owner[start : end + 1] = [owner] * (end + 1 - start)
            # A function is hashed whole, so its inner functions need no scope of their own.
            if isinstance(child, ast.ClassDef):
                self._visit(child, name + ".")


def touched(file_diff: FileDiff, before: Scopes, after: Scopes, pristine: Scopes) -> set[str]:
    """Return the scopes of the pristine file that `file_diff` changes.

    Removed lines count where they were, added lines where they land; a scope that the patches themselves
    added counts as the enclosing one that upstream has.

    Args:
        before: the file that the patch is applied to.
        after: the file it gives.
        pristine: the file as upstream ships it.
    """
    found: set[str] = set()
    for hunk in file_diff.hunks:
        old = hunk.old_start if hunk.old_count else hunk.old_start + 1
        new = hunk.new_start if hunk.new_count else hunk.new_start + 1
        for tag, text in hunk.lines:
            if text.strip() and tag == "-":
                found.add(_known(before.of_line(old), pristine))
            if text.strip() and tag == "+":
                found.add(_known(after.of_line(new), pristine))
            old += tag != "+"
            new += tag != "-"
    return found


def _known(scope: str, pristine: Scopes) -> str:
    while scope not in pristine:
        parent = scope.removesuffix(_BODY).rpartition(".")[0]
        scope = parent + _BODY if parent else MODULE
    return scope
