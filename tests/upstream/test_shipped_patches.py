"""The patches that ship, against the installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_histate.upstream import build_overlay, gates, locations, manifest, overlay_env, series, tree

GROUPS = [group for group in series.GROUPS if (locations.patches_dir() / group / "series").is_file()]


@pytest.mark.parametrize("gate", gates.GATES, ids=[gate.run.__name__ for gate in gates.GATES])
def test_gate(gate: gates.Gate) -> None:
    assert gate.run(gates.Subject.default()) == []


def test_a_changed_upstream_function_names_its_patch(tmp_path: Path) -> None:
    """Alter each patched function in a copy of its file, one at a time."""
    subject = gates.Subject.default()
    for group in subject.groups:
        for name, labels in gates.hashes.patched_scopes(subject.patches(group), subject.root).items():
            module, _, scope = name.partition(":")
            path = module.replace(".", "/") + ".py"
            if scope.endswith(">") or not (subject.root / path).is_file():
                continue
            text = (subject.root / path).read_text()
            parsed = gates.hashes.Scopes(text, path)
            lines = text.splitlines(True)
            last = max(
                n for n in range(1, len(lines) + 1) if parsed.of_line(n) == scope and lines[n - 1].strip()
            )
            lines[last - 1] = lines[last - 1].rstrip("\n") + "  # changed\n"
            shutil.rmtree(tmp_path / "sglang", ignore_errors=True)
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text("".join(lines))
            found = [
                f
                for f in gates.hashes_match(gates.Subject(subject.folder, tmp_path, ()))
                if f"changed {name}:" in f
            ]
            assert len(found) == 1 and all(label in found[0] for label in labels)


@pytest.mark.skipif("cpu" not in GROUPS, reason="there is no cpu group")
def test_a_server_process_would_import_from_the_overlay(tmp_path: Path) -> None:
    """Import sglang itself and run the self check, as every spawned process does."""
    made = build_overlay(GROUPS, cache=tmp_path)
    assert made.path is not None
    code = (
        "import sglang, sgl_kernel, sglang.version\n"
        "from sglang_histate.upstream import check_active_overlay\n"
        f"found = check_active_overlay({GROUPS!r}, sglang.__file__)\n"
        "print(sglang.__file__, sgl_kernel.__file__, sglang.version.__version__, len(found.patches))"
    )
    env = overlay_env(made, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    root = made.path
    expected = f"{root}/sglang/__init__.py {root}/sgl_kernel/__init__.py 0.5.23 {len(made.patches)}"
    assert done.stdout.strip().splitlines()[-1] == expected
    assert manifest.verify(root) is None


def test_every_choice_of_groups_builds(tmp_path: Path) -> None:
    for groups in [(group,) for group in GROUPS] + [tuple(GROUPS)]:
        made = build_overlay(groups, cache=tmp_path)
        assert made.path is not None and manifest.verify(made.path) is None
        expected = tree.apply_groups(
            [series.read_group(group) for group in groups], locations.installed_sglang().parent
        )
        for path, (_, patched) in expected.items():
            assert (made.path / path).read_bytes() == patched.encode()
