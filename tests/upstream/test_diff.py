"""The unified-diff reader: exact both ways, and strict about everything else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.upstream import UpstreamError, diff, tree

NAME = "patches/histate/x.patch"
SOURCE = "".join(f"line {n}\n" for n in range(1, 21))
PATH = "sglang/a.py"

# Few distinct lines, so that repeated context is common; odd whitespace must survive as it is.
_lines = st.lists(
    st.sampled_from(["a", "b", "", "  c", "x\r", "\x0c", "-d", "+e", "-- f", "@@ g", "é"]), max_size=30
)


@st.composite
def _texts(draw: st.DrawFn) -> tuple[str, str]:
    """A text and an edited copy of it, each with or without a newline at its end."""
    old = draw(_lines)
    new = list(old)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 3))] = draw(_lines)[:3]
    ends = draw(st.tuples(st.sampled_from(["\n", ""]), st.sampled_from(["\n", ""])))
    return ("\n".join(old) + ends[0], "\n".join(new) + ends[1])


@given(_texts())
def test_apply_gives_the_target_and_reverse_the_source(texts: tuple[str, str]) -> None:
    source, target = texts
    text = tree.unified(PATH, source, target)
    if not text:
        assert source == target
        return
    (parsed,) = diff.parse(text, NAME)
    assert diff.apply(parsed, source, NAME) == target
    assert diff.apply(parsed.reversed(), target, NAME) == source


@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch command to compare with")
def test_the_patch_command_agrees(tmp_path: Path) -> None:
    target = SOURCE.replace("line 3\n", "").replace("line 17\n", "line 17\nnew\n") + "no newline"
    (tmp_path / "sglang").mkdir()
    (tmp_path / PATH).write_text(SOURCE)
    text = tree.unified(PATH, SOURCE, target)
    subprocess.run(
        ["patch", "-p1", "--fuzz=0"], cwd=tmp_path, input=text, text=True, check=True, capture_output=True
    )
    assert (tmp_path / PATH).read_text() == target == diff.apply(diff.parse(text, NAME)[0], SOURCE, NAME)


def test_a_hunk_that_is_one_line_off_is_refused() -> None:
    text = tree.unified(PATH, SOURCE, SOURCE.replace("line 10\n", "ten\n"))
    (parsed,) = diff.parse(text, NAME)
    with pytest.raises(
        UpstreamError, match=r"x\.patch does not apply: hunk 1 of sglang/a\.py wants 'line 7.*at line 7"
    ):
        diff.apply(parsed, "one more\n" + SOURCE, NAME)


def test_changed_context_is_refused() -> None:
    text = tree.unified(PATH, SOURCE, SOURCE.replace("line 10\n", "ten\n"))
    (parsed,) = diff.parse(text, NAME)
    with pytest.raises(UpstreamError, match="at line 12 but finds 'line 12 \\\\n'"):
        diff.apply(parsed, SOURCE.replace("line 12\n", "line 12 \n"), NAME)
    with pytest.raises(UpstreamError, match="finds the end of the file"):
        diff.apply(parsed, "".join(SOURCE.splitlines(True)[:11]), NAME)


def test_it_does_not_apply_twice() -> None:
    text = tree.unified(PATH, SOURCE, SOURCE.replace("line 10\n", "line 10\nnew\n"))
    (parsed,) = diff.parse(text, NAME)
    with pytest.raises(UpstreamError):
        diff.apply(parsed, diff.apply(parsed, SOURCE, NAME), NAME)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "contains no diff"),
        ("--- a/sglang/a.py\n+++ b/sglang/b.py\n@@ -1 +1 @@\n-a\n+b\n", "of the same file"),
        ("--- a/other/a.py\n+++ b/other/a.py\n@@ -1 +1 @@\n-a\n+b\n", "paths must be a/sglang"),
        ("--- a/sglang/../x\n+++ b/sglang/../x\n@@ -1 +1 @@\n-a\n+b\n", "paths must be a/sglang"),
        ("--- /dev/null\n+++ b/sglang/b.py\n@@ -0,0 +1 @@\n+b\n", "only change existing files"),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n", "has no hunks"),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1,2 +1,2 @@\n a\n\n-b\n+c\n", "needs its leading space"),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n", "hunk ends early"),
        (
            "--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n d\n",
            "more lines than its header",
        ),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1,1 +1,2 @@\n-a\n-b\n+c\n+d\n", "do not add up"),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1 +4 @@\n-a\n+b\n", "does not follow"),
        (
            "--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -5 +5 @@\n-a\n+b\n@@ -2 +2 @@\n-a\n+b\n",
            r"hunk 2 of sglang/a\.py \(line 2\) does not follow",
        ),
        ("--- a/sglang/a.py\n+++ b/sglang/a.py\n@@ -1 +1 @@\n-a\n+b\nrubbish\n", "line 6: expected a pair"),
    ],
)
def test_malformed_diffs_are_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(UpstreamError, match=complaint) as caught:
        diff.parse(text, NAME)
    assert NAME in str(caught.value)


def test_git_headers_are_understood() -> None:
    text = "diff --git a/sglang/a.py b/sglang/a.py\nindex 1..2 100644\n"
    text += tree.unified(PATH, SOURCE, SOURCE.replace("line 1\n", ""))
    assert len(diff.parse(text, NAME)) == 1
