"""The NIXL store under both contract suites on the installed NIXL, and tests of its own behaviour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hicache_nixl import NixlDriver
from hicache_nixl_transfers import Move, Transfers

from hicache.backends.base import SetOutcome
from hicache.backends.registry import BackendSpec, open_stored
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    DriverContract,
    InspectionContract,
    OpenStore,
    OpenStored,
    SampleContract,
    Subject,
    driver_of,
    load,
    make_keys,
    open_backend,
    store_chain,
    store_of,
)

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
DEADLINE_S = 20.0


def file_of(path: Path, key: bytes, codec: FrameCodec = CODEC) -> Path:
    """Return the path of a page, which the README documents."""
    name = key.hex()
    return path / codec.namespace.hex() / name[:2] / name


def opened(path: Path, codec: FrameCodec = CODEC, mode: str | None = None) -> Subject:
    """Return the store at `path`, with raw access to its files."""

    def read(key: bytes) -> bytes | None:
        file = file_of(path, key, codec)
        return file.read_bytes() if file.exists() else None

    def write(key: bytes, data: bytes) -> None:
        file = file_of(path, key, codec)
        file.parent.mkdir(parents=True, exist_ok=True)
        (path / "raw").write_bytes(data)
        (path / "raw").rename(file)

    params = {} if mode is None else {mode: True}
    return Subject(store_of(NixlDriver, codec, str(path), params=params), read, write)


class TestNixlDriver(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: opened(tmp_path / "pages", codec)


class TestInspection(InspectionContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: opened(tmp_path / "pages", codec)

    @pytest.fixture
    def open_stored(self, tmp_path: Path) -> OpenStored:
        return lambda: open_stored(BackendSpec("nixl", {"path": str(tmp_path / "pages")}))


class TestUring(SampleContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: opened(tmp_path / "pages", codec, "use_uring")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Subject]:
    store = opened(tmp_path / "pages")
    yield store
    store.backend.close()


@pytest.mark.parametrize("size", [0, 1, CODEC.frame_bytes - 4096, CODEC.frame_bytes - 1])
def test_a_shorter_file_is_damage_although_the_frame_has_the_right_bytes(
    store: Subject, tmp_path: Path, size: int
) -> None:
    """The bytes after the end of the file are in the frame already, as in a reader whose frame held this page."""
    (key,) = make_keys(1)
    assert store_chain(store, [key]) == [STORED]
    frame = memoryview(bytearray(store.read(key) or b""))
    os.truncate(file_of(tmp_path / "pages", key), size)
    assert store.backend.batch_get([key], [frame], deadline=time.monotonic() + DEADLINE_S) == [CORRUPT]
    assert store.read(key) is None


@pytest.fixture
def short(tmp_path: Path) -> Iterator[int]:
    """A file that is shorter than a page."""
    (tmp_path / "short").write_bytes(b"s" * 100)
    with open(tmp_path / "short", "rb") as file:
        yield file.fileno()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe without data, whose read is pending until it has some."""
    source, sink = os.pipe()
    yield source, sink
    os.close(source)
    os.close(sink)


def empty_buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(4096)) for _ in range(count)]


@pytest.mark.parametrize("params", [{}, {"use_aio": True}, {"use_uring": True}])
def test_a_transfer_with_a_fault_fails_as_a_whole_and_the_next_one_works(
    tmp_path: Path, params: dict[str, object], short: int
) -> None:
    transfers, buffers = Transfers("POSIX", params), empty_buffers(2)
    (tmp_path / "whole").write_bytes(b"w" * 4096)
    with open(tmp_path / "whole", "rb") as whole:
        assert not transfers.move("READ", [(buffers[0], short), (buffers[1], whole.fileno())])
        assert transfers.move("READ", [(buffers[1], whole.fileno())])
    assert buffers[1] == b"w" * 4096


def test_a_failed_transfer_no_longer_writes_its_buffers(short: int, pipe: tuple[int, int]) -> None:
    """The read of the pipe is pending when the read of the short file fails. NIXL cancels it."""
    buffers, (source, sink) = empty_buffers(2), pipe
    assert not Transfers("POSIX", {"use_uring": True}).move("READ", [(buffers[0], short), (buffers[1], source)])
    os.write(sink, b"z" * 4096)
    assert os.read(source, 4096) == b"z" * 4096
    assert buffers[1] == bytes(4096)


def test_a_transfer_in_flight_is_waited_for(pipe: tuple[int, int]) -> None:
    (buffer,), (source, sink), outcomes = empty_buffers(1), pipe, list[bool]()
    transfers = Transfers("POSIX", {"use_uring": True})
    thread = threading.Thread(target=lambda: outcomes.append(transfers.move("READ", [(buffer, source)])))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not outcomes
    os.write(sink, b"z" * 4096)
    thread.join(DEADLINE_S)
    assert outcomes == [True] and buffer == b"z" * 4096


class FaultyFile(Transfers):
    """Transfers with the file of one inode fail."""

    inode = -1

    def move(self, operation: str, moves: Iterable[Move]) -> bool:
        some = list(moves)
        return all(os.fstat(fd).st_ino != self.inode for _, fd in some) and super().move(operation, some)


def test_pages_beside_an_unreadable_one_are_hits(store: Subject, tmp_path: Path) -> None:
    keys, faulty = make_keys(4), FaultyFile("POSIX", {})
    store_chain(store, keys)
    driver_of(store.backend, NixlDriver).transfers = faulty
    faulty.inode = file_of(tmp_path / "pages", keys[2]).stat().st_ino
    assert load(store, keys) == [HIT, HIT, GET_ERROR, HIT]
    assert store.backend.statistics().errors == {"nixl_transfer": 1}


def test_a_full_disk_rejects_the_tail_and_leaves_no_file(
    store: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, calls = os.posix_fallocate, list[int]()

    def full(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    keys = make_keys(5)
    assert store_chain(store, keys) == [STORED, STORED, *[SetOutcome.REJECTED] * 3]
    assert load(store, keys) == [HIT, HIT, MISS, MISS, MISS]
    assert list((tmp_path / "pages" / "tmp").iterdir()) == []


def test_a_hit_is_a_use_and_its_object_stays_the_same(store: Subject, tmp_path: Path) -> None:
    (key,) = make_keys(1)
    store_chain(store, [key])
    file = file_of(tmp_path / "pages", key)
    os.utime(file, (1000.0, 2000.0))
    before = next(driver_of(store.backend, NixlDriver).pages("", 0.0))
    assert load(store, [key]) == [HIT]
    after = next(driver_of(store.backend, NixlDriver).pages("", 0.0))
    assert (before.used_s, before.identity) == (1000.0, after.identity)
    assert after.used_s is not None and abs(after.used_s - time.time()) < 60


def test_an_old_temporary_file_is_removed_at_the_next_opening_and_a_new_one_stays(tmp_path: Path) -> None:
    opened(tmp_path).backend.close()
    old, new = tmp_path / "tmp" / "old", tmp_path / "tmp" / "new"
    for file in (old, new):
        file.write_bytes(b"a page")
    os.utime(old, (0, 0))
    opened(tmp_path).backend.close()
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin": "OBJ"}, "use the backend s3"),
        ({"plugin": "NONE"}, "NIXL has no plugin 'NONE'; use a file plug-in"),
        ({"plugin": "UCX"}, "does not move files"),
        ({"params": {"use_posix_aio": True}}, "use use_uring"),
        ({"pathh": "x"}, "did you mean 'path'"),
    ],
)
def test_options_that_cannot_work_are_rejected(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend("nixl", CODEC, {"path": str(tmp_path), **options})


def test_a_plugin_that_does_not_start_here_and_a_file_as_directory_are_unavailable(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="GDS_MT does not start"):
        open_backend("nixl", CODEC, {"path": str(tmp_path), "plugin": "GDS_MT"})
    (tmp_path / "file").touch()
    with pytest.raises(BackendUnavailable, match="check path and permissions"):
        open_backend("nixl", CODEC, {"path": str(tmp_path / "file")})


def test_the_entry_point_is_found_by_name(tmp_path: Path) -> None:
    backend = open_backend("nixl", CODEC, {"path": str(tmp_path), "capacity": 10 * CODEC.frame_bytes})
    assert driver_of(backend, NixlDriver) and backend.usage().capacity_bytes == 10 * CODEC.frame_bytes
    backend.close()


def run(folder: Path, *arguments: str) -> str:
    """Run a command of HiCache in `folder` and return its standard output."""
    command = [sys.executable, "-m", "hicache", *arguments]
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_ready_configuration_serves_pages_and_the_commands_support_it(tmp_path: Path) -> None:
    (tmp_path / "nixl.yaml").write_bytes((Path(__file__).parent.parent / "nixl.yaml").read_bytes())
    for _ in range(2):
        run(tmp_path, "replay", "-c", "nixl.yaml", "--requests", "60", "--prefill-rate", "0", "--json", "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens"]["hits"]["storage"] > 0 and report["wrong_bytes"] == 0
    (part,) = json.loads(run(tmp_path, "stat", "nixl.yaml", "--chains", "--json"))["parts"]
    assert part["type"] == "nixl" and part["pages"] > 0 and part["orphans"] == part["damaged"] == 0
    assert run(tmp_path, "purge", "nixl.yaml", "--yes").startswith(f"removed {part['pages']:,} page")
