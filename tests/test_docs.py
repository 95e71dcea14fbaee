"""The documents agree with the code: flags, counters, warnings, patches, targets, generated pages, links and anchors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from eval.handbook.__main__ import PAGES
from eval.handbook.__main__ import main as handbook
from sglang_histate.config import FLAG_DEFAULTS, TAKES_BACK, flag_name
from sglang_histate.upstream.locations import installed_sglang
from sglang_histate.upstream.pin import read_pin

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sglang_histate"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
HICACHE = (ROOT / "docs" / "hicache.md").read_text(encoding="utf-8")


def _rows(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# What is made from the code.


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name: str) -> None:
    there = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert there == PAGES[name](), f"docs/{name} is not up to date: run python -m eval.handbook"


def test_the_handbook_writes_what_is_stale_and_nothing_else(tmp_path: Path, capsys) -> None:
    assert handbook(["--docs", str(tmp_path), "--check"]) == 1
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out.count("not up to date") == len(PAGES)
    assert handbook(["--docs", str(tmp_path)]) == 0
    (tmp_path / "flags.md").write_text("old")
    capsys.readouterr()
    assert handbook(["--docs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "written: flags.md\n"
    assert handbook(["--docs", str(tmp_path), "--check"]) == 0


def test_every_server_flag_has_one_row_with_its_default() -> None:
    flags = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").split("## Of `histate`")[0]
    documented = {row[0].strip("`"): row[1] for row in _rows(flags) if row[0].startswith("`--")}
    assert list(documented) == [*(flag_name(name) for name in FLAG_DEFAULTS), *TAKES_BACK]
    spoken = {None: "none", False: "off"}
    for name, default in FLAG_DEFAULTS.items():
        if name not in ("histate_ssd_dir", "histate_intervals"):
            plain = default is None or default is False
            assert documented[flag_name(name)] == (spoken[default] if plain else str(default)), name


def test_flags_that_documents_name_exist() -> None:
    known = {flag_name(name) for name in FLAG_DEFAULTS} | set(TAKES_BACK)
    for document in DOCUMENTS:
        named = set(re.findall(r"--(?:no-)?histate-[a-z-]*[a-z]", document.read_text(encoding="utf-8")))
        assert named <= known, f"{document.name}: {named - known}"


# What is written by hand.


def test_every_counter_of_the_status_is_documented() -> None:
    source = (PACKAGE / "adapter" / "counters.py").read_text(encoding="utf-8")
    source += (PACKAGE / "adapter" / "status.py").read_text(encoding="utf-8")
    # Plain sums of bytes and operations that explain themselves.
    undocumented = {
        "capture_forwards_total",
        "ssd_written_bytes_total",
        "ssd_read_bytes_total",
        "ssd_reads_total",
        "ssd_reads_from_inflight_total",
    }
    names = set(re.findall(r'"(\w+_total)"', source)) - {"records_total"}
    missing = {name for name in names if f"`{name}`" not in OPERATIONS}
    assert missing <= undocumented, missing - undocumented


def _messages() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every warning or worse that the package logs; values are "..."."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, holder = node.func.attr, ast.unparse(node.func.value)
            if name in ("warning", "error", "exception", "critical") and holder in ("logger", "_log"):
                said = node.args[0]
            elif name == "warn" and holder.endswith("events"):
                said = node.args[1]
            else:
                continue
            if not isinstance(said, ast.Constant):
                continue
            text = re.sub(r"%(?:\.\d+)?[a-z]", "...", str(said.value))
            yield f"{path.name}:{node.lineno}", _returned(module, node.args[-1]) if text == "..." else text


def _returned(module: ast.Module, call: ast.expr) -> str:
    """Return the sentence that a function of the same module makes, values as "..."."""
    assert isinstance(call, ast.Call), ast.unparse(call)
    (function,) = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name == ast.unparse(call.func)
    ]
    (sentence,) = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    assert isinstance(sentence, ast.JoinedStr)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in sentence.values)


def test_every_warning_has_a_row_that_says_what_to_do() -> None:
    section = OPERATIONS.split("## Warnings")[1].split("\n## ")[0]
    rows = [row for row in _rows(section) if row[0].startswith("`")]
    assert all(len(row) == 3 and all(row) for row in rows)
    known = {row[0].strip("`"): 0 for row in rows}
    found = list(_messages())
    assert len(found) > 15
    for place, text in found:
        matches = [start for start in known if text.startswith(start)]
        assert matches, f"{place}: docs/operations.md has no row for {text!r}"
        known[max(matches, key=len)] += 1
    assert all(known.values()), f"no such warning: {[start for start, count in known.items() if not count]}"


def test_every_flag_of_hicache_has_its_counterpart() -> None:
    source = (installed_sglang() / "srt" / "arg_groups" / "fields" / "memory.py").read_text(encoding="utf-8")
    flags = {
        "--" + name.replace("_", "-") for name in re.findall(r"^    (hicache_\w+):", source, re.MULTILINE)
    }
    assert len(flags) > 10
    assert {flag for flag in flags if flag not in HICACHE} == set()


def test_the_readme_names_every_patch_of_its_group() -> None:
    series = (ROOT / "patches" / "histate" / "series").read_text(encoding="utf-8").split()
    documented = {row[0].strip("`") for row in _rows(README) if row[0].startswith("`")}
    assert documented == {name.removesuffix(".patch") for name in series} | {"cpu/*"}


def test_the_ledger_of_this_release_has_every_patch() -> None:
    ledger = (ROOT / "docs" / "rebase" / f"{read_pin().version}.md").read_text(encoding="utf-8")
    series = (ROOT / "patches" / "histate" / "series").read_text(encoding="utf-8").split()
    rows = [row for row in _rows(ledger) if row[0] == "histate"]
    assert sorted(row[1] for row in rows) == sorted(name.removesuffix(".patch") for name in series)
    assert all(row[3] for row in rows)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_documents_name_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"```.*?```|`[^`\n]*`", document.read_text(encoding="utf-8"), re.DOTALL)
    named = set(re.findall(r"(?:`|^|&& )make ([a-z-]+)\b", "\n".join(code), re.MULTILINE))
    assert named <= targets, named - targets


# Links.

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@cache
def _anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a document's headings, by GitHub's rule."""
    found: dict[str, int] = {}
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
        if found[anchor]:
            found[f"{anchor}-{found[anchor]}"] = 0
    return frozenset(found)


def broken_links(document: Path) -> list[str]:
    """Return the links of a document that lead nowhere inside the repository."""
    broken = []
    for target in _LINK.findall(_without_code(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and (path.suffix != ".md" or anchor not in _anchors(path))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One thing: `two`!\n## Again\n## Again\n```\n# no heading\n```\n")
    document = tmp_path / "a.md"
    document.write_text(
        "[1](b.md) [2](b.md#one-thing-two) [3](b.md#again-1) [4](http://x/y#z) ![5](no.png) [6](b.md#no-heading)\n"
        "[7](#here) `[8](code.md)` [9](b.md#again-2)\n# Here\n"
    )
    assert broken_links(document) == ["no.png", "b.md#no-heading", "b.md#again-2"]


def test_every_document_is_linked_from_another_one() -> None:
    linked = set()
    for document in DOCUMENTS:
        for target in _LINK.findall(_without_code(document.read_text(encoding="utf-8"))):
            linked.add((document.parent / target.partition("#")[0]).resolve())
    assert {str(path) for path in DOCUMENTS if path.name != "README.md" and path not in linked} == set()
