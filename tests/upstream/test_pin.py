"""The pin and the installed release."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_histate.upstream import UpstreamError, locations, pin


def test_the_shipped_pin() -> None:
    found = pin.read_pin()
    assert (found.package, found.version) == ("sglang", "0.5.23")
    assert all(name.startswith("sglang-0.5.23-") and len(digest) == 64 for name, digest in found.wheels)


def test_the_installed_release_passes() -> None:
    assert pin.check().version == pin.installed_version()
    assert (locations.installed_sglang() / "srt").is_dir()
    pin.check_pristine(locations.installed_sglang(), ["sglang/srt/server_args.py", "sglang/version.py"])


def test_another_release_is_refused_with_the_way_out() -> None:
    with pytest.raises(UpstreamError) as caught:
        pin.check(found="0.5.22")
    assert str(caught.value) == (
        "sglang 0.5.22 is installed but HiState needs exactly 0.5.23: run pip install sglang==0.5.23"
    )


def test_a_missing_package_is_refused() -> None:
    wanted = pin.Pin("no-such-package-here", "1.0", ())
    with pytest.raises(UpstreamError, match="no-such-package-here is not installed"):
        pin.check(wanted)


def test_a_file_changed_after_installation_is_refused(monkeypatch, fake) -> None:
    monkeypatch.setattr(pin, "_record", lambda site: {"sglang/srt/plain.py": "0" * 64})
    with pytest.raises(UpstreamError, match=r"sglang/srt/plain\.py was changed after installation"):
        pin.check_pristine(fake.installed, ["sglang/srt/plain.py", "sglang/data.txt"])


@pytest.mark.parametrize(
    "text", ["version: 0.5.23\n", "package: a b\n", "nonsense\n", "wheel: a.whl 12\n", ""]
)
def test_a_damaged_pin_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "UPSTREAM").write_text(text)
    with pytest.raises(UpstreamError, match="UPSTREAM"):
        pin.read_pin(tmp_path)


def test_the_cache_folder() -> None:
    assert locations.cache_dir({"HISTATE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert locations.cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/sglang-histate")
    assert locations.cache_dir({}) == Path.home() / ".cache/sglang-histate"
