"""EngineStorage over storage that works, is down, full or slow, or recovers."""

from __future__ import annotations

import math
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Direction, GetOutcome, SetOutcome
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import HiCacheConfig
from hicache.errors import BackendError, ConfigError, InvalidInput
from hicache.geometry import PageShape, Piece
from hicache.integrations.store import EngineStorage, PoolStorage
from hicache.keys import Namespace
from hicache_lab.clocks import ManualClock
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from hicache_lab.faults import spoiled
from tests.daemon.daemons import Daemon
from tests.listening import Listener
from tests.waiting import wait_for

PAYLOAD_BYTES = 5000
SHAPE = PageShape(64, (Piece("page", PAYLOAD_BYTES),))
FRAME_BYTES = 8192
KEYS = [bytes([number]) * 32 for number in range(1, 9)]


class OnePool(PoolStorage):
    """The storage of an engine with one pool of pages."""

    def __init__(self, storage: EngineStorage, namespace: Namespace) -> None:
        super().__init__(storage, storage.open(namespace)._gate)
        self.open, self.statistics, self.close = storage.open, storage.statistics, storage.close


Open = Callable[..., OnePool]


def missed(storage: OnePool) -> dict[str, int]:
    """Return the missed pages by reason."""
    return {"/".join(filter(None, kind)): pages for kind, pages in storage.statistics().missed.items()}


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open storages, and close them at the end."""
    made: list[EngineStorage] = []

    def open_storage(
        storage: dict[str, Any], *, processes: int = 1, epoch: int = 0, most_s: float = math.inf,
        clock: Clock = SYSTEM_CLOCK, **sections: Any,
    ) -> OnePool:
        config = HiCacheConfig.model_validate({"storage": storage, **sections})
        made.append(EngineStorage(config, processes=processes, deadline_s_max=most_s, clock=clock))
        return OnePool(made[-1], Namespace("weights", SHAPE, epoch))

    yield open_storage
    for one in made:
        one.close()


def files(folder: Path) -> dict[str, Any]:
    return {"type": "file", "options": {"path": str(folder / "pages"), "free_space_floor": 0}}


def frames(*fills: int) -> list[memoryview]:
    """Return one page for each of `fills`. All bytes of its payload have that value."""
    made = [memoryview(bytearray(FRAME_BYTES)) for _ in fills]
    for frame, fill in zip(made, fills, strict=True):
        frame[256 : 256 + PAYLOAD_BYTES] = bytes([fill]) * PAYLOAD_BYTES
    return made


def test_pages_of_one_engine_are_hits_of_the_next_one(opened: Open, tmp_path: Path) -> None:
    first = opened(files(tmp_path))
    assert first.write(KEYS[:3], frames(1, 2, 3), None) == [SetOutcome.STORED] * 3
    assert first.close()
    pages = frames(0, 0, 0, 0)
    second = opened(files(tmp_path))
    assert second.lookup(KEYS) == 3
    assert second.read(KEYS[:4], pages) == [GetOutcome.HIT] * 3 + [GetOutcome.MISS]
    assert [page[256] for page in pages] == [1, 2, 3, 0]
    assert missed(second) == {"new": 6}
    assert second.clear() == 3
    assert second.lookup(KEYS) == 0
    assert missed(second) == {"new": 11, "evicted/cleared": 3}


def test_a_damaged_page_is_a_miss(opened: Open, tmp_path: Path) -> None:
    storage = opened(files(tmp_path))
    storage.write(KEYS[:2], frames(1, 2), None)
    (stored,) = (path for path in (tmp_path / "pages").rglob("*") if path.is_file() and KEYS[0].hex() in path.name)
    data = bytearray(stored.read_bytes())
    data[300] ^= 1
    stored.write_bytes(data)
    assert storage.read(KEYS[:2], frames(0, 0)) == [GetOutcome.CORRUPT, GetOutcome.HIT]
    assert missed(storage) == {"damaged": 1}
    assert storage.has(KEYS[:3]) == [False, True, False]
    assert storage.lookup(KEYS[:2]) == 0  # the second one is there, but cannot be used without the first one
    assert missed(storage) == {"damaged": 4, "new": 1}


def test_a_store_that_is_down_at_the_start_is_used_once_it_is_up(opened: Open, scratch: Path) -> None:
    daemon = Daemon(scratch)
    storage = opened({"type": "remote", "options": {"socket": str(daemon.socket)}})
    assert storage.lookup(KEYS) == 0
    assert storage.write(KEYS[:1], frames(1), None) == [SetOutcome.ERROR]
    assert storage.statistics().skipped == {Direction.READ: 1, Direction.WRITE: 1}
    with daemon:
        # Each call also checks whether the store is up.
        wait_for(lambda: storage.write(KEYS[:1], frames(1), None)[0].is_stored)
        assert storage.lookup(KEYS) == 1
        assert storage.statistics().stores


def test_an_engine_starts_although_its_server_never_answers(opened: Open) -> None:
    hung = threading.Event()

    def hang(_: socket.socket, __: int) -> None:
        hung.wait()

    with Listener(hang) as server:
        options = {"url": f"http://{LOOPBACK}:{server.port}", "timeout": 0.2}
        storage = opened({"type": "remote", "options": options})
        assert storage.lookup(KEYS) == 0
        hung.set()


def test_a_folder_with_other_files_fails_the_start(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir(mode=0o700)
    (tmp_path / "pages" / "thesis.txt").write_text("important")
    with pytest.raises(BackendError, match="not a HiCache file store"):
        opened(files(tmp_path))


def test_a_configuration_without_storage_is_an_error() -> None:
    with pytest.raises(ConfigError, match="storage: is not configured"):
        EngineStorage(HiCacheConfig())


def test_writes_to_a_full_store_back_off_and_reads_are_hits(opened: Open, tmp_path: Path) -> None:
    small = files(tmp_path)
    small["options"]["capacity"] = 4 * FRAME_BYTES
    storage = opened(small, clock=ManualClock())
    found = storage.write(KEYS, frames(*range(8)), None)
    assert not all(outcome.is_stored for outcome in found)
    stored = sum(outcome.is_stored for outcome in found)
    assert storage.write(KEYS[:1], frames(0), None) == [SetOutcome.ERROR]  # the store is not called
    assert storage.statistics().skipped[Direction.WRITE] == 1
    assert storage.lookup(KEYS) == stored
    assert missed(storage) == {"not_stored/full": 8 - stored}
    storage.write(more := [bytes([9]) * 32], frames(9), None)
    assert storage.has(more) == [False] and missed(storage)["not_stored/paused"] == 1


@pytest.mark.parametrize(("configured_s", "most_s"), [(1, math.inf), (60, 1)])
def test_a_slow_call_ends_at_its_deadline_and_the_next_call_is_skipped(
    opened: Open, tmp_path: Path, configured_s: float, most_s: float
) -> None:
    slow, clock = spoiled(files(tmp_path), latency=3600), ManualClock()
    storage = opened(slow, most_s=most_s, clock=clock, transfer={"storage_deadline": configured_s})
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(storage.lookup, KEYS)
        wait_for(call.done, lambda: clock.advance(0.05))
        assert call.result() == 0
    assert storage.lookup(KEYS) == 0
    assert storage.statistics().skipped[Direction.READ] == 1
    assert missed(storage) == {"late/lookup": 8, "unavailable": 8}
    clock.advance(3600)  # ends the count of the stored pages


def test_close_ends_while_a_call_hangs(opened: Open, tmp_path: Path) -> None:
    began, go_on = threading.Event(), threading.Event()
    storage = opened(files(tmp_path), transfer={"shutdown_deadline": 0.05})
    store = storage._gate.storage
    assert store is not None

    def hang(*_: object, **__: object) -> int:
        began.set()
        go_on.wait()
        return 0

    store.backend.batch_exists = hang  # type: ignore[method-assign]  # no real store hangs on demand
    caller = threading.Thread(target=storage.lookup, args=(KEYS,))
    caller.start()
    began.wait()
    assert not storage.close()
    go_on.set()
    caller.join()
    store.backend.close()


def test_a_closed_storage_returns_misses_and_errors(opened: Open, tmp_path: Path) -> None:
    storage = opened(files(tmp_path))
    assert storage.close() and storage.close()
    assert storage.lookup(KEYS) == 0
    assert storage.read(KEYS[:1], frames(0)) == [GetOutcome.ERROR]
    assert storage.write(KEYS[:1], frames(1), None) == [SetOutcome.ERROR]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_metrics_count_calls_of_the_store_and_skipped_calls(opened: Open, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    storage = opened(files(tmp_path), metrics={"port": port})
    storage.write(KEYS[:2], frames(1, 2), None)
    storage.read(KEYS[:3], frames(0, 0, 0))
    page = scrape(port)
    for line in (
        'hicache_backend_set_pages_total{backend="file",outcome="stored"} 2.0',
        'hicache_backend_get_pages_total{backend="file",outcome="hit"} 2.0',
        'hicache_skipped_total{reason="store_paused"} 0.0',
        'hicache_missed_pages_total{detail="",reason="new"} 1.0',
        'hicache_missed_pages_total{detail="full",reason="not_stored"} 0.0',
        "hicache_storage_open_failures_total 0.0",
        "hicache_build_info",
    ):
        assert line in page
    storage.close()
    with pytest.raises(OSError):
        scrape(port)


def test_pools_share_one_page_of_metrics_and_only_the_first_one_measures_the_store(
    opened: Open, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    first = opened(files(tmp_path), metrics={"port": port})
    second = first.open(Namespace("weights", SHAPE, engine_layout="states"), "mamba")
    first.write(KEYS[:2], frames(1, 2), None)
    second.write(KEYS[:3], frames(1, 2, 3), None)
    page = scrape(port)
    for name, pages in (("file", 2), ("file-mamba", 3)):
        assert f'hicache_backend_set_pages_total{{backend="{name}",outcome="stored"}} {pages}.0' in page
    assert page.count("\nhicache_skipped_total{") == 2
    wait_for(lambda: 'hicache_backend_stored_pages{backend="file"} 5.0' in scrape(port))
    assert 'hicache_backend_stored_pages{backend="file-mamba"}' not in scrape(port)
    assert first.close()
    assert second.lookup(KEYS) == 0
    with pytest.raises(InvalidInput, match="open it once"):
        first.open(Namespace("weights", SHAPE, engine_layout="others"), "others")


def test_metrics_say_that_storage_that_cannot_be_opened_keeps_nothing(opened: Open, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    storage = opened({"type": "remote", "options": {"socket": str(tmp_path / "none")}}, metrics={"port": port})
    line = 'hicache_backend_keeps_nothing{backend="storage"} 1.0'
    wait_for(lambda: line in scrape(port), lambda: storage.lookup(KEYS))
    (store,) = storage.statistics().stores
    assert store.health.cause == "not_open" and str(tmp_path / "none") in store.health.what


def test_processes_of_one_engine_use_consecutive_ports(opened: Open, tmp_path: Path) -> None:
    first, _second = free_ports(2)
    for _ in range(2):
        opened(files(tmp_path), processes=100, metrics={"port": first})
    assert "hicache_build_info" in scrape(first)
    with pytest.raises(ConfigError, match=f"port {first}"):
        opened(files(tmp_path), metrics={"port": first})
