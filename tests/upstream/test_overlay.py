"""The overlay: what is in it, when it is rebuilt, and that it is never half there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from sglang_histate.upstream import Overlay, UpstreamError, build_overlay, groups_for, manifest, overlay_env
from sglang_histate.upstream import overlay as overlay_module


def _tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def _python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_patched_files_are_copies_and_the_rest_are_links(fake) -> None:
    before = _tree(fake.site)
    made = fake.build("cpu", "histate")
    root = made.path
    assert "LIMIT = 1" in (root / "sglang/srt/scheduler.py").read_text()
    assert "histate.made" in (root / "sglang/srt/scheduler.py").read_text()
    assert not (root / "sglang/srt").is_symlink() and not (root / "sglang/srt/deep/ops.py").is_symlink()
    assert os.readlink(root / "sglang/lang") == str(fake.installed / "lang")
    assert os.readlink(root / "sglang/srt/plain.py") == str(fake.installed / "srt/plain.py")
    assert (root / "sgl_kernel").resolve() == fake.stand_in.resolve()
    assert made.groups == ("cpu", "histate")
    assert made.patches[0] == "patches/cpu/cpu-op.patch" and len(made.patches) == 4
    assert _tree(fake.site) == before


def test_groups_choose_what_is_patched(fake) -> None:
    histate = fake.build("histate")
    assert "LIMIT = 3" in (histate.path / "sglang/srt/scheduler.py").read_text()
    assert not (histate.path / "sgl_kernel").exists() and histate.stand_in is None
    assert (histate.path / "sglang/srt/deep").is_symlink()
    cpu = fake.build("cpu")
    assert "histate" not in (cpu.path / "sglang/srt/scheduler.py").read_text()
    assert fake.build("histate", "cpu") == fake.build("cpu", "histate")
    assert fake.build() == Overlay(None, (), (), None)
    with pytest.raises(UpstreamError, match="no patch group 'gpu'"):
        fake.build("gpu")


def test_a_process_started_with_the_environment_uses_it(fake, tmp_path: Path) -> None:
    made = fake.build("cpu", "histate")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own_module.py").write_text("")
    env = overlay_env(made, {**os.environ, "PYTHONPATH": f"{fake.site}{os.pathsep}{tmp_path / 'mine'}"})
    code = (
        "import sglang, sgl_kernel, own_module, sglang.srt.scheduler as s, sglang.lang.api as a;"
        "print(sglang.__file__, s.LIMIT, a.VALUE, sgl_kernel.STAND_IN)"
    )
    assert _python(code, env) == f"{made.path}/sglang/__init__.py 1 1 True"
    assert env["HISTATE_OVERLAY"] == str(made.path) and env["HISTATE_GROUPS"] == "cpu,histate"
    # Python's own pyc files of a real folder stay in the overlay.
    assert not (fake.installed / "srt/__pycache__").exists()


def test_the_environment_of_an_inner_process_drops_the_outer_overlay(fake) -> None:
    outer = overlay_env(fake.build("cpu"), {"PYTHONPATH": "/mine", "OTHER": "1"})
    inner = overlay_env(fake.build("histate"), outer)
    assert inner["PYTHONPATH"] == f"{fake.build('histate').path}{os.pathsep}/mine"
    stock = overlay_env(fake.build(), outer)
    assert stock == {"PYTHONPATH": "/mine", "OTHER": "1", "HISTATE_GROUPS": ""}
    assert "PYTHONPATH" not in overlay_env(fake.build(), {})


def test_a_sound_overlay_is_reused(fake) -> None:
    first = fake.build("cpu")
    stamp = (first.path / "manifest.json").stat().st_mtime_ns
    assert fake.build("cpu").path == first.path
    assert (first.path / "manifest.json").stat().st_mtime_ns == stamp
    assert manifest.verify(first.path) is None


def _damage_file(root: Path) -> None:
    (root / "sglang/srt/scheduler.py").write_text("LIMIT = 9\n")


def _damage_link(root: Path) -> None:
    (root / "sglang/lang").unlink()


def _damage_target(root: Path) -> None:
    (root / "sglang/lang").unlink()
    (root / "sglang/lang").symlink_to("/nowhere")


def _damage_manifest(root: Path) -> None:
    (root / "manifest.json").write_text("{")


def _remove_manifest(root: Path) -> None:
    (root / "manifest.json").unlink()


def _damage_key(root: Path) -> None:
    raw = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**raw, "key": "0"}))


@pytest.mark.parametrize(
    "damage", [_damage_file, _damage_link, _damage_target, _damage_manifest, _remove_manifest, _damage_key]
)
def test_a_damaged_overlay_is_rebuilt(fake, damage) -> None:
    made = fake.build("cpu", "histate")
    sound = _tree(made.path)
    damage(made.path)
    assert fake.build("cpu", "histate").path == made.path
    assert manifest.verify(made.path) is None and _tree(made.path) == sound
    assert [p.name for p in made.path.parent.iterdir() if p.name.startswith(".build")] == []


def test_a_changed_patch_stand_in_or_package_gives_another_overlay(fake) -> None:
    paths = {fake.build("cpu").path}
    (fake.stand_in / "more.py").write_text("")
    paths.add(fake.build("cpu").path)
    fake.add_patch("cpu", "cpu-plain.patch", {"sglang/srt/plain.py": ("True", "False")})
    paths.add(fake.build("cpu").path)
    fake.site.rename(fake.site.with_name("elsewhere"))
    fake.site = fake.site.with_name("elsewhere")
    paths.add(fake.build("cpu").path)
    assert len(paths) == 4


def test_a_changed_installed_file_is_noticed(fake) -> None:
    made = fake.build("histate")
    path = fake.installed / "srt/scheduler.py"
    path.write_text(path.read_text() + "# local change\n")
    assert "no longer the one that was patched" in str(manifest.verify(made.path))
    fake.build("histate")  # the patches still apply
    assert (made.path / "sglang/srt/scheduler.py").read_text().endswith("# local change\n")
    path.write_text(path.read_text().replace("first.run(now)", "first.run()"))
    with pytest.raises(UpstreamError, match=r"step-hook\.patch does not apply"):
        fake.build("histate")


def test_nothing_is_left_when_a_patch_does_not_apply(fake) -> None:
    (fake.installed / "srt/deep/ops.py").write_text("")
    with pytest.raises(UpstreamError, match=r"patches/cpu/cpu-op\.patch does not apply"):
        fake.build("cpu")
    assert not fake.cache.exists()


def test_a_folder_that_others_can_write_is_refused(fake) -> None:
    made = fake.build("cpu")
    made.path.chmod(0o777)
    with pytest.raises(UpstreamError, match="can be written by another user"):
        fake.build("cpu")


def test_an_unusable_cache_is_one_sentence(fake) -> None:
    fake.cache.write_text("a file")
    with pytest.raises(UpstreamError, match="set HISTATE_CACHE_DIR"):
        fake.build("cpu")


def test_a_missing_stand_in_is_refused(fake) -> None:
    (fake.stand_in / "__init__.py").unlink()
    with pytest.raises(UpstreamError, match=r"stand-in .* is missing"):
        fake.build("cpu")


def _build_in_process(folders: tuple[Path, Path, Path, Path]) -> str:
    installed, patches, stand_in, cache = folders
    path = build_overlay(installed=installed, patches=patches, stand_in=stand_in, cache=cache).path
    assert path is not None
    return f"{path} {manifest.verify(path)}"


def test_builders_may_race(fake) -> None:
    folders = (fake.installed, fake.patches, fake.stand_in, fake.cache)
    with ProcessPoolExecutor(4) as pool:
        for damaged in (False, True):
            results = set(pool.map(_build_in_process, [folders] * 12))
            assert results == {f"{fake.build('cpu', 'histate').path} None"}
            if not damaged:
                _damage_file(fake.build("cpu", "histate").path)
    assert len(list((fake.cache / "overlays").glob("[!.]*"))) == 1


_KILLED = """
import sys
from pathlib import Path
from sglang_histate.upstream import overlay
installed, patches, stand_in, cache = map(Path, sys.argv[1:])
def stop(*args):
    print("half built", flush=True)
    sys.stdin.read()
setattr(overlay, "STOP", stop)
overlay.build_overlay(installed=installed, patches=patches, stand_in=stand_in, cache=cache)
"""


@pytest.mark.parametrize("where", ["shutil.copymode", "_publish", "os.rename"])
def test_a_killed_build_leaves_no_half_overlay(fake, where: str) -> None:
    """Stop a build right before a patched file is finished, before the swap, and before the rename; then
    kill it.
    """
    folders = [fake.installed, fake.patches, fake.stand_in, fake.cache]
    code = (
        _KILLED.replace("STOP", where)
        if "." not in where
        else _KILLED.replace('setattr(overlay, "STOP", stop)', f"overlay.{where} = stop")
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "half built\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    base = fake.cache / "overlays"
    (left,) = base.glob(".build-*")
    assert list(base.glob("[!.]*")) == []
    made = fake.build("cpu", "histate")  # not blocked by the dead builder's lock
    assert manifest.verify(made.path) is None and left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    _damage_manifest(made.path)
    fake.build("cpu", "histate")
    assert not left.exists()


def test_groups_of_a_run() -> None:
    assert groups_for(histate=True, gpu=True) == ("histate",)
    assert groups_for(histate=False, gpu=True) == ()
    assert groups_for(histate=True, gpu=False) == ("cpu", "histate")
    assert groups_for(histate=False, gpu=False) == ("cpu",)


def test_the_stand_in_is_found_where_the_package_has_it() -> None:
    assert overlay_module.stand_in_dir().parts[-4:] == ("sglang_histate", "cpu", "stand_in", "sgl_kernel")
