"""The documents agree with the code: flags, defaults, counters, patches, targets and links."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_histate.config import FLAG_DEFAULTS, flag_name
from sglang_histate.policy.interval import DEFAULT_INTERVALS

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _rows(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_flag_is_documented_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1] for row in _rows(OPERATIONS) if row[0].startswith("`--")}
    assert set(documented) == {flag_name(name) for name in FLAG_DEFAULTS}
    spoken = {None: "none, required", False: "off"}
    for name, default in FLAG_DEFAULTS.items():
        wanted = spoken[default] if default is None or default is False else str(default)
        if name == "histate_intervals":
            first, second, *_, last, _none = DEFAULT_INTERVALS
            wanted = f"{first},{second},...,{last},none"
        if name == "histate_policy_log":
            wanted = "none"
        assert documented[flag_name(name)] == wanted, name


def test_every_counter_of_the_status_is_documented() -> None:
    source = (ROOT / "sglang_histate" / "adapter" / "counters.py").read_text(encoding="utf-8")
    source += (ROOT / "sglang_histate" / "adapter" / "status.py").read_text(encoding="utf-8")
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


def test_the_readme_names_every_patch_of_its_group() -> None:
    series = (ROOT / "patches" / "histate" / "series").read_text(encoding="utf-8").split()
    documented = {row[0].strip("`") for row in _rows(README) if row[0].startswith("`")}
    assert documented == {name.removesuffix(".patch") for name in series} | {"cpu/*"}


def test_the_readme_names_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"for"} <= targets


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            assert target.startswith("http") or (document.parent / target).exists(), (
                f"{document.name}: {target}"
            )
