"""Failures around the Mooncake backend: no master, no daemon, owners of pages and masters that die, hang and restart.

Calls that must not hang get a limit (`promptly`) of at most half a minute, in cases where the library itself would wait
that long or forever. Calls that the library limits itself take their seconds.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from hicache.backends.base import GetOutcome
from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.store import Store
from hicache.config import MooncakeStorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache.units import MIB
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    SET_ERROR,
    STORED,
    empty_frames,
    make_keys,
    soon,
    store_of,
)
from hicache_lab.devservers import MooncakeClientDaemon, MooncakeMaster
from hicache_lab.devservers.ports import free_ports
from tests.test_supervised import no_threads
from tests.waiting import wait_for

from .store import CODEC, LEASE_MS, SEGMENT_BYTES, Memory, open_backend, store

T = TypeVar("T")
notices_death = pytest.mark.parametrize("own_master", [2], indirect=True, ids=["notices death"])
# The library waits 30 s for a hanging daemon; a verb with a deadline of half a second does not.
PROMPT_S = 20.0
SHORT_S = 0.5
SLOW_CLASSES = {"connection_lost", "timeout", "transfer", "no_segment", "no_replica"}


def promptly(call: Callable[[], T]) -> T:
    """Return the result of `call`; fail if it takes longer than `PROMPT_S`."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(PROMPT_S)


def shortly() -> float:
    return time.monotonic() + SHORT_S


def load(backend: Store, keys: list[bytes], deadline: float | None = None) -> list[GetOutcome]:
    return backend.batch_get(keys, empty_frames(CODEC, len(keys)), deadline=deadline or soon())


def stores_again(backend: Store, keys: list[bytes] | None = None) -> bool:
    """Return whether pages can be stored; a failed attempt may have stored some of them."""
    return all(outcome.is_stored for outcome in store(backend, keys or make_keys(2, "later"), deadline=shortly()))


@pytest.fixture
def own_master(request: pytest.FixtureRequest) -> Iterator[MooncakeMaster]:
    """A master that a test may harm. It forgets a dead owner after `request.param` seconds, until then it places pages
    there. By default it does not: on a busy machine, a living owner may be as slow."""
    seconds: int = getattr(request, "param", 3600)
    with MooncakeMaster(lease_ms=LEASE_MS, flags=(f"--client_ttl={seconds}",)) as server:
        yield server


@pytest.fixture
def owner(own_master: MooncakeMaster) -> Iterator[MooncakeClientDaemon]:
    """A process that owns all memory of the store."""
    with MooncakeClientDaemon(own_master, segment_bytes=64 * MIB) as daemon:
        yield daemon


@pytest.fixture
def backend(own_master: MooncakeMaster, owner: MooncakeClientDaemon) -> Iterator[Store]:
    """A backend without a segment, which moves its pages itself."""
    backend = open_backend(own_master, segment=0)
    yield backend
    backend.close()


@pytest.fixture
def through_daemon(own_master: MooncakeMaster, owner: MooncakeClientDaemon) -> Iterator[Store]:
    backend = open_backend(own_master, daemon=owner.address)
    yield backend
    backend.close()


def open_backend_at(address: str, daemon: str | None = None) -> None:
    options = MooncakeStorageOptions(master=address, daemon=daemon, segment=0, timeout=1.0)
    promptly(lambda: store_of(MooncakeDriver, CODEC, options))


def test_without_its_master_or_daemon_opening_is_refused_with_advice(own_master: MooncakeMaster) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(BackendUnavailable, match=f"master {address} .* check that it runs"):
        open_backend_at(address)
    with pytest.raises(BackendUnavailable, match=f"daemon {address}"):
        open_backend_at(own_master.address, address)
    own_master.pause()
    with pytest.raises(BackendUnavailable, match="could not be joined"):
        open_backend_at(own_master.address)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[mooncake\]'"):
        open_backend_at("127.0.0.1:1")


def test_with_its_master_dead_every_verb_reports_errors_and_close_returns(
    own_master: MooncakeMaster, backend: Store
) -> None:
    keys = make_keys(3)
    assert store(backend, keys) == [STORED] * 3
    own_master.kill()
    assert promptly(lambda: backend.batch_exists(keys, deadline=shortly())) == 0
    assert promptly(lambda: load(backend, keys, shortly())) == [GET_ERROR] * 3
    assert promptly(lambda: store(backend, make_keys(2, "new"), deadline=shortly())) == [SET_ERROR] * 2
    assert promptly(lambda: backend.delete(keys, deadline=shortly())) == 0
    before = backend.usage()
    found = backend.statistics().errors
    assert set(found) <= SLOW_CLASSES | {"admin"} and found["admin"] == 1
    assert sum(found.values()) - found["admin"] >= 1 + 3 + 2 + 3
    assert backend.usage() == before
    promptly(backend.close)
    assert load(backend, keys) == [GET_ERROR] * 3


def test_a_master_restarted_empty_is_used_again(own_master: MooncakeMaster, backend: Store) -> None:
    keys = make_keys(3)
    store(backend, keys)
    own_master.restart()
    wait_for(lambda: stores_again(backend, keys), timeout_s=60.0)
    assert load(backend, keys) == [HIT] * 3


def test_a_master_that_hangs_costs_errors_and_heals(own_master: MooncakeMaster, backend: Store) -> None:
    keys = make_keys(2)
    store(backend, keys)
    own_master.pause()
    assert promptly(lambda: backend.batch_exists(keys, deadline=shortly())) == 0
    assert promptly(lambda: load(backend, keys, shortly())) == [GET_ERROR] * 2
    assert set(backend.statistics().errors) <= SLOW_CLASSES
    own_master.resume()
    wait_for(lambda: backend.batch_exists(keys, deadline=soon()) == 2)
    assert load(backend, keys) == [HIT] * 2


@notices_death
def test_pages_of_a_dead_owner_are_errors_or_misses_and_never_hits(
    owner: MooncakeClientDaemon, backend: Store
) -> None:
    keys = make_keys(3)
    store(backend, keys)
    owner.kill()
    outcomes = promptly(lambda: load(backend, keys))
    assert set(outcomes) <= {GET_ERROR, MISS}
    assert not any(outcome.is_stored for outcome in promptly(lambda: store(backend, make_keys(2, "new"))))
    owner.start()
    wait_for(lambda: stores_again(backend), timeout_s=60.0)


def test_a_hanging_owner_delays_registered_frames_once_without_late_writes(
    owner: MooncakeClientDaemon, backend: Store
) -> None:
    keys = make_keys(3)
    memory = Memory(CODEC, 3)
    backend.register_memory(memory.whole)
    store(backend, keys)
    assert backend.batch_get(keys, memory.frames, deadline=soon()) == [HIT] * 3
    owner.pause()
    # The library uses the frames: this verb ends when the library gives up, after the deadline.
    assert promptly(lambda: backend.batch_get(keys, memory.frames, deadline=shortly())) == [GET_ERROR] * 3
    memory.poison()
    # From now on frames are copied, and the verb does not wait for the library.
    assert promptly(lambda: backend.batch_get(keys, memory.frames, deadline=shortly())) == [GET_ERROR] * 3
    assert set(backend.statistics().errors) <= SLOW_CLASSES
    owner.resume()
    others = empty_frames(CODEC, 3)
    wait_for(lambda: backend.batch_get(keys, others, deadline=soon()) == [HIT] * 3, timeout_s=60.0)
    assert memory.is_poisoned()


def test_a_hanging_daemon_is_abandoned_at_the_deadline_and_writes_no_frame(
    owner: MooncakeClientDaemon, through_daemon: Store
) -> None:
    keys = make_keys(3)
    store(through_daemon, keys)
    owner.pause()
    memory = Memory(CODEC, 3)
    memory.poison()
    assert promptly(lambda: through_daemon.batch_get(keys, memory.frames, deadline=shortly())) == [GET_ERROR] * 3
    assert promptly(lambda: through_daemon.batch_exists(keys, deadline=shortly())) == 0
    assert promptly(lambda: store(through_daemon, make_keys(2, "new"), deadline=shortly())) == [SET_ERROR] * 2
    assert through_daemon.statistics().errors["timeout"] >= 3
    owner.resume()
    wait_for(lambda: stores_again(through_daemon), timeout_s=60.0)
    assert memory.is_poisoned()
    # Bounce buffers of abandoned calls are released when the calls end.
    through_daemon.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-mooncake-")]


@notices_death
def test_a_restarted_daemon_is_used_again(owner: MooncakeClientDaemon, through_daemon: Store) -> None:
    keys = make_keys(3)
    store(through_daemon, keys)
    owner.kill()
    assert promptly(lambda: load(through_daemon, keys, shortly())) == [GET_ERROR] * 3
    assert set(through_daemon.statistics().errors) <= SLOW_CLASSES
    owner.start()
    wait_for(lambda: stores_again(through_daemon), timeout_s=60.0)


def test_a_process_that_has_closed_its_backend_listens_on_nothing(master: MooncakeMaster, repository: Path) -> None:
    child = Path(__file__).with_name("child.py")
    done = subprocess.run(
        [sys.executable, str(child), master.address], cwd=repository, env={"PYTHONPATH": str(repository)},
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["open", "2", "closed", "0"]), done.stderr


def test_without_threads_every_verb_counts_errors_and_opening_is_refused(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.mooncake.client.LINGER_S", 0.0)
    keys = make_keys(2)
    backend = open_backend(master)
    assert store(backend, keys) == [STORED] * 2
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("hicache-mooncake-")])
    with no_threads():
        assert load(backend, keys) == [GET_ERROR] * 2
        assert store(backend, make_keys(2, "more")) == [SET_ERROR] * 2
        assert backend.batch_exists(keys, deadline=soon()) == backend.delete(keys, deadline=shortly()) == 0
        with pytest.raises(BackendUnavailable, match="cannot start more threads"):
            open_backend(master, segment=2 * SEGMENT_BYTES)
    assert set(backend.statistics().errors) == {"no_thread"}
    assert load(backend, keys) == [HIT] * 2
    backend.check()
    backend.close()
