"""The memory of this machine and the limits of cgroups, in files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.errors import CapacityError
from hicache.host_memory import HostMemory, host_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {24 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\n"
V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    return tmp_path


def read(machine: Path, cgroup: str | None) -> HostMemory:
    if cgroup is not None:
        (machine / "proc/self/cgroup").write_text(cgroup)
    return host_memory(machine / "proc", machine / "cgroup")


def v2(folder: Path, limit: int | str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("max", limit), ("current", used), ("stat", f"anon 1\ninactive_file {cached}")):
        (folder / f"memory.{name}").write_text(f"{text}\n")


def v1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {cached}\n")


@pytest.mark.parametrize("cgroup", [None, "0::/\n", "1:cpu:/\n", "0::/user.slice\n5:memory:/none\n"])
def test_without_a_limit_the_machine_counts(machine: Path, cgroup: str | None) -> None:
    found = read(machine, cgroup)
    assert found == HostMemory(24 * GIB, 20 * GIB, None) and found.usable_bytes == 24 * GIB


def test_the_limit_of_a_container_counts_and_its_page_cache_is_available(machine: Path) -> None:
    v2(machine / "cgroup", 8 * GIB, 5 * GIB, 2 * GIB)
    found = read(machine, "0::/\n")
    assert found == HostMemory(24 * GIB, 5 * GIB, 8 * GIB) and found.usable_bytes == 8 * GIB


def test_the_smallest_limit_of_the_hierarchy_counts(machine: Path) -> None:
    v2(machine / "cgroup/system.slice", 4 * GIB, 3 * GIB)
    v2(machine / "cgroup/system.slice/engine.service", "max", 2 * GIB)
    v2(machine / "cgroup/system.slice/engine.service/worker", 6 * GIB, GIB)
    found = read(machine, "0::/system.slice/engine.service/worker\n")
    assert (found.limit_bytes, found.available_bytes) == (4 * GIB, GIB)


def test_version_1_has_its_own_names_and_writes_a_huge_number_for_no_limit(machine: Path) -> None:
    v1(machine / "cgroup/memory", V1_UNLIMITED, 10 * GIB)
    assert read(machine, "4:memory:/docker/abc\n0::/\n").limit_bytes is None
    v1(machine / "cgroup/memory/docker/abc", 16 * GIB, 15 * GIB, 3 * GIB)
    found = read(machine, "4:cpu,memory:/docker/abc\n")
    assert (found.limit_bytes, found.available_bytes) == (16 * GIB, 4 * GIB)


def test_paths_outside_of_a_container_are_not_followed(machine: Path) -> None:
    v2(machine / "cgroup", 8 * GIB, GIB)
    assert read(machine, "0::/../../system.slice\n").limit_bytes == 8 * GIB


def test_a_kernel_without_the_figures_is_an_error(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(CapacityError, match="MemAvailable"):
        read(machine, None)


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.available_bytes <= found.usable_bytes <= found.total_bytes
