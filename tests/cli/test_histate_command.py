"""The `histate` command: exit codes, one-sentence errors, and what each action prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_histate import copy
from sglang_histate.cli import main
from sglang_histate.copy import packing
from sglang_histate.copy.kernels import load
from sglang_histate.upstream import gates, hashes, locations, overlay, pin, tree


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HISTATE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def altered_root(tmp_path: Path) -> tuple[Path, str, str]:
    """A copy of every file in use, with one function altered; also its name and the patch that changes it."""
    subject = gates.Subject.default()
    recorded = hashes.read_recorded()
    if not recorded:
        pytest.skip("no hashes are recorded")
    root = tmp_path / "root"
    for name in recorded:
        path = name.partition(":")[0].replace(".", "/")
        path = path + ".py" if (subject.root / (path + ".py")).is_file() else path + "/__init__.py"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(subject.root / path, root / path)
    name = next(
        name for name, row in recorded.items() if row.read_by[0].startswith("patches/") and "<" not in name
    )
    module, _, scope = name.partition(":")
    path = module.replace(".", "/") + ".py"
    lines = (root / path).read_text().splitlines(True)
    scopes = hashes.Scopes("".join(lines), path)
    last = max(n for n in range(1, len(lines) + 1) if scopes.of_line(n) == scope)
    lines[last - 1] = lines[last - 1].rstrip("\n") + "  # changed\n"
    (root / path).write_text("".join(lines))
    return root, name, recorded[name].read_by[0]


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sglang_histate.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'sglang', 'numpy', 'sglang_histate.upstream'} & set(sys.modules)\n"
        "sys.exit(code or len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout and "patches" in done.stdout


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["patches"], ["patches", "nonsense"], ["patches", "export"]]
)
def test_bad_usage_is_2(argv: list[str], capsys) -> None:
    assert main(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_list_names_every_patch(capsys) -> None:
    assert main(["patches", "list"]) == 0
    out = capsys.readouterr().out
    subject = gates.Subject.default()
    for group in subject.groups:
        for patch in subject.patches(group):
            assert patch.label in out and patch.header["Description"] in out


def test_check_passes_on_the_installed_release(capsys) -> None:
    assert main(["patches", "check"]) == 0, capsys.readouterr().out
    assert "FAIL" not in capsys.readouterr().out


def test_check_names_the_patch_of_a_changed_function(altered_root, capsys) -> None:
    root, name, label = altered_root
    assert main(["patches", "check", "--root", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"upstream changed {name}: re-read {label}" in out and out.count("upstream changed") == 1


def test_a_wrong_root_is_one_sentence(tmp_path: Path, capsys) -> None:
    assert main(["patches", "check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"histate: {tmp_path} holds no sglang/ folder\n"


def test_diff_is_the_difference_of_all_groups(capsys) -> None:
    assert main(["patches", "diff"]) == 0
    out = capsys.readouterr().out
    subject = gates.Subject.default()
    for path, (pristine, patched) in tree.apply_groups(
        [subject.patches(group) for group in subject.groups], subject.root
    ).items():
        assert tree.unified(path, pristine, patched) in out


def test_diff_of_one_patch(capsys) -> None:
    subject = gates.Subject.default()
    patch = subject.patches(subject.groups[0])[0]
    for name in (patch.name, patch.name.removesuffix(".patch"), patch.label):
        assert main(["patches", "diff", name]) == 0
        assert capsys.readouterr().out == patch.text
    assert main(["patches", "diff", "no-such"]) == 2
    assert "there is no patch 'no-such': choose from" in capsys.readouterr().err


def test_export_can_be_applied(tmp_path: Path, capsys) -> None:
    target = tmp_path / "out"
    assert main(["patches", "export", str(target)]) == 0
    assert main(["patches", "export", str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (target / "patches/UPSTREAM").is_file()
    if shutil.which("patch"):
        with open(target / "combined.patch") as diff:
            subprocess.run(
                ["patch", "-p1", "--fuzz=0", "-s"], cwd=target / "pristine", stdin=diff, check=True
            )
        for path in (target / "patched").rglob("*.py"):
            relative = path.relative_to(target / "patched")
            assert (target / "pristine" / relative).read_bytes() == path.read_bytes()


def test_record_writes_beside_the_patches(tmp_path: Path, monkeypatch, capsys) -> None:
    copied = tmp_path / "patches"
    shutil.copytree(locations.patches_dir(), copied)
    (copied / "hashes.json").unlink(missing_ok=True)
    monkeypatch.setattr(gates, "patches_dir", lambda: copied)
    assert main(["patches", "record"]) == 0
    assert f"in {copied}/hashes.json" in capsys.readouterr().out
    assert hashes.read_recorded(copied) == hashes.read_recorded()


def test_doctor_reports_a_usable_machine(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ssd = tmp_path / "ssd"
    ssd.mkdir(mode=0o700)
    assert main(["doctor", "--ssd-dir", str(ssd), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pin_ok"] and facts["sglang"] == "0.5.23" and facts["problems"] == []
    assert (
        facts["device"] == "cpu" and facts["kernels"] == "CPU torch ops" and facts["page_size_tokens"] == 64
    )
    assert facts["copy_engine"] == "cpu" and facts["copy_engines_rejected"] == []
    assert facts["copy_pack"] == "none: states are encoded by a thread where they are on cpu"
    assert not facts["overlay_built"] and facts["patch_groups"] == ["cpu", "histate"]
    assert facts["ssd_writable"] and facts["ssd_mode"] == "0700" and facts["ssd_free_bytes"] > 0
    overlay.build_overlay(facts["patch_groups"])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "overlay built         yes" in out and "ssd dir               not given" in out


def test_doctor_says_why_nothing_faster_copies(monkeypatch, capsys) -> None:
    chosen = copy.Chosen(copy.host_engine(), {"cudaMemcpyBatchAsync": "the device cannot"})
    monkeypatch.setattr(copy, "choose_engine", lambda device: chosen)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["copy_engines_rejected"] == ["cudaMemcpyBatchAsync: the device cannot"]
    assert "copies do not go by cudaMemcpyBatchAsync: the device cannot" in facts["warnings"]
    assert not any("packed" in warning for warning in facts["warnings"])
    torch_packs = packing.Packing("torch", "no nvcc", load(torch.device("cpu")))
    monkeypatch.setattr(packing, "choose_packing", lambda device, encoding: torch_packs)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["copy_pack"] == "torch: no nvcc"
    assert "encoded records are packed by torch, not by kernels: no nvcc" in facts["warnings"]

    def broken(device: object) -> None:
        raise RuntimeError("nothing can copy\nand more")

    monkeypatch.setattr(copy, "choose_engine", broken)
    assert main(["doctor", "--json"]) == 1
    assert "no copy engine: nothing can copy" in json.loads(capsys.readouterr().out)["problems"]


def test_doctor_fails_on_another_release(monkeypatch, capsys) -> None:
    monkeypatch.setattr(pin, "installed_version", lambda package="sglang": "0.5.22")
    assert main(["doctor", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert not facts["pin_ok"] and "pip install sglang==0.5.23" in facts["problems"][0]


def test_doctor_fails_on_an_unusable_directory(tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--ssd-dir", str(tmp_path / "no/such"), "--json"]) == 1
    assert "cannot be used" in json.loads(capsys.readouterr().out)["problems"][-1]
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert main(["doctor", "--ssd-dir", str(shared), "--json"]) == 1
    assert "run chmod 700" in json.loads(capsys.readouterr().out)["problems"][-1]


def test_a_directory_yet_to_be_made_is_a_warning(tmp_path: Path, capsys) -> None:
    main(["doctor", "--ssd-dir", str(tmp_path / "new"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert any("does not exist yet" in warning for warning in facts["warnings"])
    assert not (tmp_path / "new").exists()


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m sglang_histate.cli patches diff | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=dict(os.environ))
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_patches_build_makes_the_overlays_that_a_start_would_make(tmp_path, capsys) -> None:
    assert main(["patches", "build", "--cpu"]) == 0
    built = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in built] == ["cpu, histate", "cpu"]
    for histate in (True, False):
        found, there = overlay.find_overlay(overlay.groups_for(histate, gpu=False))
        assert there and str(found.path) in "\n".join(built)
    assert main(["patches", "build", "--gpu"]) == 0
    # Without HiState a machine with a GPU needs no patch at all.
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["histate"]
    assert main(["patches", "build", "--gpu", "--cpu"]) == 2
