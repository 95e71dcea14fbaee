"""The long trial: passed by the kernels' code on the CPU, failed by kernels that do anything else."""

from __future__ import annotations

import pytest
import torch

from kernels import trial
from kernels.reference import TorchKernels

CPU = torch.device("cpu")


def test_the_kernels_code_passes_on_the_cpu(host_kernels, c_kernels) -> None:
    for kernels in (host_kernels, c_kernels, TorchKernels("itself")):
        assert trial.differences(kernels, CPU, trial.LONG) == []


class Broken(TorchKernels):
    def __init__(self, how: str) -> None:
        super().__init__("")
        self.how = how

    def _pack(self, pool, form, slots, records, flags, most_blocks):
        super()._pack(pool, form, slots, records, flags, most_blocks)
        if self.how == "writes behind a record":
            records[-1, form.record_bytes] = 0
        if self.how == "loses a flag":
            flags.zero_()
        if self.how == "swaps two slots" and len(records) > 1:
            records[[0, -1]] = records[[-1, 0]].clone()

    def _unpack(self, pool, form, slots, records, sources, layers, most_blocks):
        if self.how == "ignores layer groups":
            layers = range(pool.layers)
        if self.how == "forgets the last target":
            slots, sources = slots[:-1], sources[:-1]
        super()._unpack(pool, form, slots, records, sources, layers, most_blocks)
        if self.how == "writes between slots":
            memory = pool.temporal.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(memory)[-1] = 0


@pytest.mark.parametrize(
    "how",
    [
        *("writes behind a record", "loses a flag", "swaps two slots", "ignores layer groups"),
        *("forgets the last target", "writes between slots"),
    ],
)
def test_anything_else_fails(how) -> None:
    assert trial.differences(Broken(how), CPU, trial.LONG)


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trial.main([]) == 1 and "no GPU" in capsys.readouterr().err


def test_a_missing_sanitizer_is_no_success(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trial.shutil, "which", lambda name: None)
    assert trial.sanitize("memcheck", tmp_path / "a.so") == (None, "compute-sanitizer is not installed")


@pytest.mark.parametrize(
    ("script", "clean", "text"),
    [
        ("exit 0", True, ""),
        ("echo ERROR SUMMARY: 3; exit 99", False, "3"),
        ("echo Device not supported; exit 1", None, "not supported"),
        ("exec sleep 5", None, "took more than"),
    ],
)
def test_what_the_sanitizer_says_is_kept(monkeypatch, tmp_path, script, clean, text) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found, said = trial.sanitize("memcheck", tmp_path / "a.so", timeout_s=1)
    assert found is clean and text in said
