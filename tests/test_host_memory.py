"""The memory of this machine and the limits of cgroups, in files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.errors import CapacityError
from hicache.host_memory import HostMemory, host_memory, resolve
from hicache.units import Share
from tests.log_records import messages_of

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


# Shares


def size_of(machine: Path, share: float, cgroup: str | None = None, *, shared: bool = False) -> int:
    if cgroup is not None:
        (machine / "proc/self/cgroup").write_text(cgroup)
    return resolve(Share(share), "L2", shared=shared, proc=machine / "proc", cgroups=machine / "cgroup")


def test_a_share_is_of_the_available_memory_of_the_machine_and_is_logged(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hicache")
    assert size_of(machine, 80) == 16 * GIB
    assert size_of(machine, 12.5) == 5 * GIB // 2
    assert messages_of(caplog, "host_memory") == [
        "L2: 80% of 20.0 GiB available = 16.0 GiB", "L2: 12.5% of 20.0 GiB available = 2.5 GiB"
    ]


def test_a_size_is_not_changed_and_not_logged(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hicache")
    assert resolve(99 * GIB, "L2", proc=machine / "none") == 99 * GIB and not messages_of(caplog, "host_memory")


def test_a_share_is_of_the_memory_that_the_smallest_cgroup_has_left(machine: Path) -> None:
    v2(machine / "cgroup", 8 * GIB, 5 * GIB, 2 * GIB)
    assert size_of(machine, 40, "0::/\n") == 2 * GIB
    v2(machine / "cgroup/system.slice", 4 * GIB, 3 * GIB)
    v2(machine / "cgroup/system.slice/engine.service", 6 * GIB, GIB)
    assert size_of(machine, 50, "0::/system.slice/engine.service\n") == GIB // 2
    v1(machine / "cgroup/memory/docker/abc", 16 * GIB, 15 * GIB, 3 * GIB)
    assert size_of(machine, 25, "4:cpu,memory:/docker/abc\n") == GIB


def test_a_share_of_shared_memory_is_limited_by_the_free_bytes_of_its_mount(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hicache")

    def mount(blocks: int, free: int) -> None:
        found = SimpleNamespace(f_frsize=4096, f_blocks=blocks, f_bavail=free, f_bfree=blocks)
        monkeypatch.setattr("hicache.host_memory.os.statvfs", lambda path: found)

    mount(8 * GIB >> 12, GIB >> 12)
    assert size_of(machine, 50, shared=True) == GIB // 2
    assert messages_of(caplog, "host_memory") == ["L2: 50% of 1.0 GiB free in /dev/shm = 512.0 MiB"]
    assert size_of(machine, 50) == 10 * GIB, "private memory is elsewhere"
    mount(80 * GIB >> 12, 70 * GIB >> 12)
    assert size_of(machine, 50, shared=True) == 10 * GIB, "a mount may be larger than the memory"
    mount(0, 0)
    assert size_of(machine, 50, shared=True) == 10 * GIB, "a mount may have no limit"


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.available_bytes <= found.usable_bytes <= found.total_bytes
