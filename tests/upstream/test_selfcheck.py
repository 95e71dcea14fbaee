"""The start-up self check refuses every process that is not the one intended."""

from __future__ import annotations

import pytest

from sglang_histate.upstream import UpstreamError, check_active_overlay, overlay_env, pin


@pytest.fixture
def active(fake):
    made = fake.build("cpu", "histate")
    return made, overlay_env(made, {}), made.path / "sglang/__init__.py"


def test_the_right_overlay_passes(active) -> None:
    made, env, file = active
    found = check_active_overlay(("histate", "cpu"), file, env)
    assert found is not None and found.patches == made.patches


def test_stock_passes_outside_an_overlay(fake) -> None:
    assert check_active_overlay((), fake.installed / "__init__.py", {}) is None


def test_sglang_from_elsewhere_is_refused(active, fake) -> None:
    _, env, file = active
    with pytest.raises(UpstreamError, match=r"comes earlier on sys\.path"):
        check_active_overlay(("cpu", "histate"), fake.installed / "__init__.py", env)
    with pytest.raises(UpstreamError, match="HISTATE_OVERLAY is not set"):
        check_active_overlay(("cpu", "histate"), file, {})
    with pytest.raises(UpstreamError, match="none was asked for"):
        check_active_overlay((), file, env)
    with pytest.raises(UpstreamError, match="none was asked for"):
        check_active_overlay((), file, {})


def test_other_groups_are_refused(active) -> None:
    _, env, file = active
    with pytest.raises(UpstreamError, match="patch groups cpu, histate but this server needs histate"):
        check_active_overlay(("histate",), file, env)
    with pytest.raises(UpstreamError, match="needs cpu, histate"):
        check_active_overlay(("cpu", "histate"), file, {**env, "HISTATE_GROUPS": "cpu"})


def test_a_damaged_overlay_is_refused(active) -> None:
    made, env, file = active
    (made.path / "sglang/srt/scheduler.py").write_text("")
    with pytest.raises(UpstreamError, match=r"srt/scheduler\.py was changed after it was built"):
        check_active_overlay(("cpu", "histate"), file, env)


def test_another_release_is_refused(active, monkeypatch) -> None:
    _, env, file = active
    monkeypatch.setattr(pin, "installed_version", lambda package: "0.5.24")
    with pytest.raises(UpstreamError, match=r"sglang 0\.5\.24 is installed"):
        check_active_overlay(("cpu", "histate"), file, env)
