"""The ordering contract: no race on the adapter's own code paths, and one as soon as any single wait is left out."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from sglang_histate.copy.ordering import Rule
from tests.copy.fake_device import ROOT, FakeDevice, Site

from .conftest import GPU
from .copy_scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
PACKAGE = ROOT / "sglang_histate"
# SGLang's own waits that restores and demotions rest on: a load and a backup behind the forward pass that may use the
# rows, and each layer of the next one behind its load.
UPSTREAM = {"start_loading", "start_writing", "wait"}
# Waits that no rule names: streams of SGLang's transfers, and the probe at start.
UNNAMED = {"adapter/arena_transfers.py", "copy/ordering.py", "copy/probe.py"}


def run(name: str, skip: Site | None = None) -> FakeDevice:
    device = FakeDevice(skip)
    with pytest.MonkeyPatch.context() as patch:
        SCENARIOS[name](device, patch)
    return device


@cache
def sites() -> dict[Site, tuple[str, ...]]:
    """Return every wait that takes place, and in which scenarios."""
    found: dict[Site, list[str]] = defaultdict(list)
    for name in SCENARIOS:
        for site in run(name).sites:
            found[site].append(name)
    return {site: tuple(names) for site, names in found.items()}


def is_ours(site: Site) -> bool:
    return Path(site.file).is_relative_to(PACKAGE)


def goes_wrong(name: str, skip: Site) -> bool:
    try:
        device = run(name, skip)
    except (AssertionError, RuntimeError):
        return True
    return bool(device.races or device.host_waits)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_read_or_written_too_early(name) -> None:
    device = run(name)
    assert device.races == [] and device.sites
    assert device.host_waits == [], "the scheduler thread waited"


def test_without_any_single_wait_something_goes_wrong() -> None:
    needed = [site for site in sites() if is_ours(site) or site.function in UPSTREAM]
    assert {site.function for site in needed if not is_ours(site)} >= UPSTREAM
    unseen = [site for site in needed if not any(goes_wrong(name, site) for name in sites()[site])]
    assert unseen == [], "a wait that is not needed, or a lack of it that is not seen"


def test_every_wait_of_the_adapter_is_in_a_scenario() -> None:
    """A wait names its rule where it is made, so the sources tell where they all are."""
    taken = {
        (Path(site.file).relative_to(PACKAGE).as_posix(), site.line) for site in sites() if is_ours(site)
    }
    missing, rules = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name == "copy/ordering.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            named = [
                argument.attr
                for argument in node.args
                if isinstance(argument, ast.Attribute) and getattr(argument.value, "id", "") == "Rule"
            ]
            rules.update(named)
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if named and not any((name, line) in taken for line in lines):
                missing.append(f"{name}:{node.lineno} {named}")
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in ("wait_event", "wait_stream", "synchronize", "query") and name not in UNNAMED:
                missing.append(f"{name}:{node.lineno} waits without a rule")
    assert missing == []
    assert rules == set(Rule.__members__), "a rule that nothing keeps"
