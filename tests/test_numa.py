"""NUMA: which node a device is on, by a folder like /sys, and memory that the kernel is told to take from a node."""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import InvalidInput
from hicache.geometry import PageShape, Piece
from hicache.mapping import address_of, populate
from hicache.numa import NODES_MAX, bind, bind_file, numa_node
from hicache.shared_memory import Layout, Role, SharedMemory, path_of
from hicache.tiers import HostPool, SharedHostPool
from tests.log_records import records_of

SIZE = 1 << 20
SHAPE = PageShape(4, (Piece("kv", 4096),))
DEVICE = "0000:3b:00.0"


def sysfs(folder: Path, online: str = "0-1", node: str = "1", device: str = DEVICE) -> Path:
    """A folder like /sys of a machine with these nodes and one device."""
    for path, text in (("devices/system/node/online", online), (f"bus/pci/devices/{device}/numa_node", node)):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("name", "device"),
    [(DEVICE, DEVICE), ("0000:3B:00.0", DEVICE), ("00000000:3B:00.0", DEVICE), ("10000:01:00.0", "10000:01:00.0")],
)
def test_the_node_of_a_device_is_found_however_its_id_is_written(tmp_path: Path, name: str, device: str) -> None:
    assert numa_node(name, sysfs(tmp_path, device=device)) == 1


@pytest.mark.parametrize("online", ["0-1", "0,8", "1,3-5"])
def test_nodes_can_be_numbered_with_gaps(tmp_path: Path, online: str) -> None:
    assert numa_node(DEVICE, sysfs(tmp_path, online=online)) == 1


@pytest.mark.parametrize(
    ("name", "contents"),
    [(DEVICE, {"node": "-1"}), (DEVICE, {"node": ""}), (DEVICE, {"online": "0", "node": "0"}),
     (DEVICE, {"online": "12", "node": "12"}), ("0000:3c:00.0", {}), ("../../0000:3b:00.0", {}), ("", {})],
    ids=str,
)
def test_systems_with_one_node_or_without_numa_have_no_node(
    tmp_path: Path, name: str, contents: dict[str, str]
) -> None:
    assert numa_node(name, sysfs(tmp_path, **contents)) is None


def test_a_system_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa_node(DEVICE, tmp_path) is None


def policy_of(mapping: mmap.mmap) -> str:
    """The policy of the memory at the start of a mapping, as the kernel says: `default`, `prefer:0`."""
    address = address_of(memoryview(mapping))
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    start, policy = max((int(line[0], 16), line[1]) for line in lines if int(line[0], 16) <= address)
    assert start > address - (1 << 40)
    return policy


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> int:
    """A node that memory can be bound to."""
    try:
        online = Path("/sys/devices/system/node/online").read_text()
        policy_of(mmap.mmap(-1, SIZE))
    except (OSError, ValueError):
        pytest.skip("this kernel has no NUMA")
    first = int(re.split("[-,\n]", online)[0])
    if not bind(mmap.mmap(-1, SIZE), first):
        pytest.skip(f"this system does not let processes bind memory: {caplog.text}")
    return first


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses."""
    chosen = f"test-numa-{os.getpid()}"
    yield chosen
    path_of(chosen).unlink(missing_ok=True)


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_prefers_the_node_that_it_was_bound_to(node: int, flags: int) -> None:
    mapping = mmap.mmap(-1, SIZE, flags=flags | mmap.MAP_ANONYMOUS)
    assert policy_of(mapping) == "default"
    assert bind(mapping, node)
    assert policy_of(mapping) == f"prefer:{node}"
    assert populate(mapping)
    assert mapping[:].count(0) == SIZE


def test_a_file_keeps_the_node_that_it_was_bound_to_while_it_was_empty(node: int, name: str) -> None:
    with path_of(name).open("x+b") as file:
        assert bind_file(file.fileno(), SIZE, node)
        assert os.fstat(file.fileno()).st_size == 0
        file.truncate(SIZE)
        assert policy_of(mmap.mmap(file.fileno(), SIZE)) == f"prefer:{node}"


def test_pools_take_their_memory_from_their_node(node: int, name: str) -> None:
    private = HostPool(SHAPE, 64, node=node)
    shared = SharedHostPool(name, SHAPE, 64, timeout_s=10, role=Role.ALONE, node=node)
    for pool in (private, shared):
        assert policy_of(pool._mapping) == f"prefer:{node}"
        assert pool.node == node and not pool.buffer.any()
    shared.unlink()
    assert policy_of(HostPool(SHAPE, 64)._mapping) == "default"


def test_a_joining_process_finds_the_memory_of_the_first_one(node: int, name: str) -> None:
    layout = Layout(0, 4, 8192, b"s" * 32)
    first = SharedMemory.open(name, layout, deadline=time.monotonic() + 10, node=node)
    second = SharedMemory.open(name, layout, deadline=time.monotonic() + 10)
    assert policy_of(second.mapping) == policy_of(first.mapping) == f"prefer:{node}"
    first.unlink()


def test_a_refusal_by_the_kernel_is_a_warning_and_the_pool_starts(caplog: pytest.LogCaptureFixture, name: str) -> None:
    pool = HostPool(SHAPE, 64, node=NODES_MAX - 1)
    assert not pool.buffer.any()
    (record,) = records_of(caplog, "numa")
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"host memory is not bound to NUMA node {NODES_MAX - 1}: mbind: ")
    SharedHostPool(name, SHAPE, 64, timeout_s=10, role=Role.ALONE, node=NODES_MAX - 1).unlink()
    assert len(records_of(caplog, "numa")) == 2


@pytest.mark.parametrize("bad", [-1, NODES_MAX, 0.5, True, "0"], ids=str)
def test_a_node_that_cannot_exist_is_refused_before_memory_is_taken(name: str, bad: object) -> None:
    with pytest.raises(InvalidInput, match="host pool: node"):
        HostPool(SHAPE, 1, node=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="host pool: node"):
        SharedHostPool(name, SHAPE, 1, timeout_s=10, node=bad)  # type: ignore[arg-type]
    assert not path_of(name).exists()
