"""Available host memory, read from a made-up machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_histate.config import ConfigError
from sglang_histate.pool.limits import available_memory, check_host_size

GIB = 1 << 30


class Machine:
    """Files below `root` as Linux shows them."""

    def __init__(self, root: Path, available: int = 64 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, limit: object, used: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup{group.rstrip('/')}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 0\n")

    def v1(self, group: str, limit: int, used: int) -> None:
        folder = f"sys/fs/cgroup/memory{group.rstrip('/')}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/user.slice\n")
    machine.v2("/user.slice", "max", GIB)
    found = available_memory(machine.root)
    assert found.size_bytes == 64 * GIB and found.source == "available on this machine"


def test_a_container_of_version_2(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.v2("/", 8 * GIB, 3 * GIB, cache=GIB)
    found = available_memory(machine.root)
    assert found.size_bytes == 6 * GIB
    assert found.source == "left of the container's limit of 8.00GiB"


def test_the_tightest_level_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/server\n")
    machine.v2("/pod/server", 16 * GIB, GIB)
    machine.v2("/pod", 4 * GIB, GIB)
    assert available_memory(machine.root).size_bytes == 3 * GIB


def test_a_container_of_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/ignored\n")
    machine.v1("/docker/abc", 10 * GIB, 3 * GIB)
    machine.v1("/", 1 << 62, 9 * GIB)
    assert available_memory(machine.root).size_bytes == 8 * GIB


def test_a_container_that_does_not_see_its_own_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    machine.v1("/", 10 * GIB, 3 * GIB)
    assert available_memory(machine.root).size_bytes == 8 * GIB


def test_a_full_container_and_one_that_cannot_be_read(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.v2("/a", GIB, 2 * GIB)
    assert available_memory(machine.root).size_bytes == 0
    assert available_memory(machine.root / "nothing").size_bytes == 1 << 62


def test_more_than_there_is_is_refused_in_one_sentence(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.v2("/", 8 * GIB, GIB)
    check_host_size(None, root=machine.root)
    check_host_size(7 * GIB, root=machine.root)
    check_host_size(14 * GIB, nodes=2, root=machine.root)
    with pytest.raises(ConfigError) as caught:
        check_host_size(7 * GIB + 1, root=machine.root)
    text = str(caught.value)
    assert "\n" not in text and text.startswith("--histate-host-size 7.00GiB")
    assert "7.00GiB are left of the container's limit of 8.00GiB" in text and "give at most" in text


def test_this_machine() -> None:
    assert 0 < available_memory().size_bytes < 1 << 62
