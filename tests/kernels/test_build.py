"""The build: no kernel spills for any GPU, and what is built is found again, or built again when it must be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import build

from .conftest import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    *(f"pack_kernel<{name}>" for name in ("native", "bf16")),
    *(f"unpack_kernel<{name}>" for name in ("native", "bf16", "int8")),
    *("pack_int8_tile_kernel", "pack_int8_any_kernel"),
}


def or_skip(make):
    try:
        return make()
    except build.BuildError as error:
        if any(text in str(error) for text in ("no nvcc was found", "needs a C++ compiler")):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def built() -> build.Built:
    """The kernels for all GPUs. Compiled once per version of the sources."""
    return or_skip(lambda: build.build(LIBRARIES / "gpus.so"))


def test_no_kernel_spills_and_all_fit_twice_on_a_multiprocessor(built) -> None:
    assert {(use.kernel, use.arch) for use in built.kernels} == {
        (name, arch) for name in NAMES for arch in ("80", "90", "100")
    }
    assert build.complaints(built) == []


def test_a_spill_and_too_many_registers_are_complaints(built) -> None:
    good = built.kernels[0]
    spilling, large = replace(good, spilled_bytes=4), replace(good, registers=65)
    found = build.complaints(replace(built, kernels=(good, spilling, large)))
    assert len(found) == 2 and "4 bytes spilled" in found[0] and "65 registers" in found[1]


def test_what_ptxas_says_is_read() -> None:
    said = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7histate13unpack_kernelILNS_8EncodingE2EEEvNS_4CallENS_4WalkE' for 'sm_90'
ptxas info    : Function properties for _ZN7histate13unpack_kernelILNS_8EncodingE2EEEvNS_4CallENS_4WalkE
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
"""
    assert list(build.parse_ptxas(said)) == [build.KernelUse("unpack_kernel<int8>", "90", 64, 16)]
    for unknown in (
        "",
        "nothing",
        said.replace("spill loads", "spilt loads"),
        said.replace("registers", "regs"),
    ):
        with pytest.raises(build.BuildError, match="ptxas reported"):
            list(build.parse_ptxas(unknown))


def test_a_library_is_built_once_per_version_of_the_sources(built, monkeypatch) -> None:
    def no_compiler(command):
        raise build.BuildError("compiled")

    monkeypatch.setattr(build, "_run", no_compiler)
    assert build.build(built.path) == built
    facts = json.loads(built.path.with_suffix(".json").read_text())
    assert "path" not in facts and facts["archs"] == ["80", "90", "100"]
    with pytest.raises(build.BuildError, match="compiled"):
        build.build(built.path, ("90",))
    monkeypatch.setattr(build, "source_hash", lambda extra=(): "another")
    with pytest.raises(build.BuildError, match="compiled"):
        build.build(built.path)
    assert build.read_built(built.path) == built  # a build that failed left the old one in place


def test_each_source_counts(tmp_path, monkeypatch) -> None:
    shutil.copytree(build.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    hashes = {build.source_hash()}
    for path in sorted((tmp_path / "csrc").iterdir()):
        path.write_text(path.read_text() + "\n")
        hashes.add(build.source_hash())
    assert len(hashes) == 1 + len(list((tmp_path / "csrc").iterdir()))


def test_which_gpus_a_library_runs_on(built) -> None:
    covered = {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}
    others = {(7, 5), (7, 0)}
    assert all(built.covers(each) for each in covered) and not any(built.covers(each) for each in others)
    hopper = replace(built, archs=("90",))
    assert hopper.covers((9, 0)) and hopper.covers((10, 0)) and not hopper.covers((8, 0))
    assert not replace(built, archs=("86",)).covers((8, 0))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kernels": [{"no": 1}]}'])
def test_facts_that_cannot_be_read_are_no_library(tmp_path, text) -> None:
    (tmp_path / "a.so").write_bytes(b"")
    assert build.read_built(tmp_path / "a.so") is None
    (tmp_path / "a.json").write_text(text)
    assert build.read_built(tmp_path / "a.so") is None


def test_the_compiler_that_pip_installs_is_found_and_works(tmp_path, monkeypatch) -> None:
    wheels = [Path(place) / "cu13" for place in _nvidia_places()]
    wheels = [home for home in wheels if (home / "bin" / "nvcc").exists()]
    if not wheels:
        pytest.skip("no nvcc is installed by pip")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvcc" else real(name))
    if Path("/usr/local/cuda/bin/nvcc").exists():
        monkeypatch.setenv("CUDA_HOME", str(wheels[0]))
    assert or_skip(build.find_nvcc) == wheels[0] / "bin" / "nvcc"
    compiled = build.build(LIBRARIES / "pip.so", ("90",), ffi=False)
    assert len(compiled.kernels) == len(NAMES) and not compiled.tvm_ffi


def _nvidia_places() -> list[str]:
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec else []


def test_without_a_compiler_one_sentence_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(build.BuildError, match="set CUDA_HOME"):
        build.find_nvcc()
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.find_nvcc()
    with pytest.raises(build.BuildError, match="tvm-ffi is not installed"):
        build._ffi_flags()


def test_sources_that_do_not_compile_are_an_error_with_the_compilers_words(tmp_path, monkeypatch) -> None:
    or_skip(build.find_nvcc)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bind.cu").write_text("int a = broken;")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    with pytest.raises(build.BuildError, match=r"nvcc failed:\n(?s:.)*broken"):
        build.build(tmp_path / "a.so", ("90",), ffi=False)
    assert not (tmp_path / "a.so").exists()


def test_the_package_has_the_sources_and_what_was_built_but_not_the_bench() -> None:
    import tomllib

    from setuptools import find_packages

    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **told["packages"]["find"])
    assert "sglang_histate.copy._kernels" in found
    assert not [name for name in found if "bench" in name]
    package = ROOT / "sglang_histate"
    data = {path for pattern in told["package-data"]["sglang_histate"] for path in package.glob(pattern)}
    assert {package / "copy" / "_kernels" / "csrc" / path.name for path in build.CSRC.iterdir()} <= data
    assert (
        build.SHIPPED.parent.name == "lib"
        and "copy/_kernels/lib/*.so" in told["package-data"]["sglang_histate"]
    )


def test_make_kernels_runs_this_build() -> None:
    said = subprocess.run(["make", "-n", "kernels"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m kernels.build" in said.stdout


def test_the_command_says_what_is_wrong(monkeypatch, capsys, built) -> None:
    def fails(*args, **options):
        raise build.BuildError("no nvcc was found: set CUDA_HOME")

    monkeypatch.setattr(build, "build", fails)
    assert build.main([]) == 1 and "error: no nvcc" in capsys.readouterr().err
    spilling = replace(built, kernels=(replace(built.kernels[0], spilled_bytes=8),))
    monkeypatch.setattr(build, "build", lambda *args, **options: spilling)
    assert build.main([]) == 1 and "8 bytes spilled" in capsys.readouterr().err
    monkeypatch.setattr(build, "build", lambda *args, **options: built)
    assert build.main([]) == 0 and "sm_100" in capsys.readouterr().out


def test_the_library_loads_and_says_that_there_is_no_gpu(built) -> None:
    """In a process of its own: a library that CUDA has seen fail once is of no more use in this one."""
    code = f"""
import torch
from pathlib import Path
from kernels.compiled import CompiledKernels
from kernels.table import PoolTable
from sglang_histate.config import CheckpointDtype
kernels = CompiledKernels(Path({str(built.path)!r}), "ahead of time", "")
pool = PoolTable(torch.zeros(1, 2, 1, 4, 4), torch.zeros(1, 2, 3, 3))
try:
    kernels.pack(pool, [1], torch.zeros(1, 4096, dtype=torch.uint8), CheckpointDtype.NATIVE)
except RuntimeError as error:
    print("refused:", error)
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert "refused: the CUDA runtime refused the launch (cudaError" in done.stdout, done.stderr
