"""Groups, headers, and the merge of two groups that patch one file."""

from __future__ import annotations

import pytest

from sglang_histate.upstream import UpstreamError, series, tree


def test_patches_come_in_series_order(fake) -> None:
    patches = series.read_group("histate", fake.patches)
    assert [patch.name for patch in patches] == ["step-hook.patch", "make-hook.patch"]
    assert patches[0].header["Description"] == "Change for step-hook.patch. More about it."
    assert patches[0].label == "patches/histate/step-hook.patch"


def test_series_and_folder_must_agree(fake) -> None:
    series.check_folder("cpu", fake.patches)
    (fake.patches / "cpu/extra.patch").write_text("")
    with pytest.raises(UpstreamError, match=r"cpu/extra\.patch is not listed"):
        series.check_folder("cpu", fake.patches)
    (fake.patches / "cpu/extra.patch").unlink()
    (fake.patches / "cpu/cpu-op.patch").unlink()
    with pytest.raises(UpstreamError, match=r"lists cpu-op\.patch, which does not exist"):
        series.check_folder("cpu", fake.patches)
    with pytest.raises(UpstreamError, match=r"cpu-op\.patch cannot be read"):
        series.read_group("cpu", fake.patches)
    (fake.patches / "cpu/series").write_text("a.patch\na.patch\n")
    with pytest.raises(UpstreamError, match=r"lists a\.patch twice"):
        series.read_series("cpu", fake.patches)


@pytest.mark.parametrize("field", series.REQUIRED_FIELDS)
def test_every_header_field_is_required(fake, field: str) -> None:
    path = fake.patches / "cpu/cpu-op.patch"
    text = path.read_text()
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith((field, " More"))))
    with pytest.raises(UpstreamError, match=rf"cpu-op\.patch has no {field} field"):
        series.read_group("cpu", fake.patches)


def test_last_verified_is_the_pin(fake) -> None:
    path = fake.patches / "cpu/cpu-op.patch"
    path.write_text(path.read_text().replace("Last-Verified: 0.5.23", "Last-Verified: 0.5.22"))
    with pytest.raises(UpstreamError, match=r"last verified on 0\.5\.22, but the pin is 0\.5\.23"):
        series.read_group("cpu", fake.patches)


def test_two_groups_merge_in_one_file(fake) -> None:
    groups = [series.read_group(group, fake.patches) for group in series.GROUPS]
    pristine, patched = tree.apply_groups(groups, fake.site)["sglang/srt/scheduler.py"]
    assert patched == (
        pristine.replace("LIMIT = 3", "LIMIT = 1")
        .replace("        first.run(now)\n", "        first.run(now)\n        histate.stepped(first)\n")
        .replace("return Scheduler()", "return histate.made(Scheduler())")
    )


@pytest.mark.parametrize("old", ["        first.run(now)", "        return first"])
def test_groups_that_touch_the_same_place_conflict(fake, old: str) -> None:
    fake.add_patch("cpu", "cpu-step.patch", {"sglang/srt/scheduler.py": (old, old + "  # cpu")})
    groups = [series.read_group(group, fake.patches) for group in series.GROUPS]
    with pytest.raises(UpstreamError, match=r"two groups change .*step-hook\.patch"):
        tree.apply_groups(groups, fake.site)
