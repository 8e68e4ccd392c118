"""Stores get the memory of the host pool before their first call, and not on the scheduler thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend, leaves
from hicache.backends.compose import LevelsBackend, Part
from hicache.backends.guard import GuardedBackend
from hicache.backends.limit import LimitedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.mooncake import MooncakeBackend
from hicache.backends.testing import soon
from hicache.config.guard import GuardConfig
from hicache.errors import BackendError
from hicache.frame import PageBuffer
from hicache.lab.devservers import MooncakeMaster
from tests.backends.mooncake.store import open_backend
from tests.cache.world import LastingBackend, World, codec, prompt

KEY = prompt(1, 2, 3)


class Registering(LastingBackend):
    """A store that records registrations of memory, their threads, and the calls before the first one."""

    def __init__(self, epoch: int = 0, error: Exception | None = None) -> None:
        super().__init__(codec(epoch))
        self.registered: list[memoryview] = []
        self.threads: list[threading.Thread] = []
        self.unregistered_calls = 0
        self.closes = 0
        self._error = error

    def register_memory(self, memory: memoryview) -> None:
        if self._error is not None:
            raise self._error
        self.registered.append(memory)
        self.threads.append(threading.current_thread())

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        self.unregistered_calls += not self.registered
        return super().batch_exists(keys, deadline=deadline)

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        self.unregistered_calls += not self.registered
        return super().batch_get(keys, pages, deadline=deadline)

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        self.unregistered_calls += not self.registered
        return super().batch_set(keys, pages, parent=parent, deadline=deadline)

    def close(self) -> None:
        self.closes += 1


def until_open(world: World) -> None:
    world.until(lambda: world.controller.backend is not None)
    world.step()


def store_and_load(world: World) -> int:
    """Store a prompt and read it back; return how many of its tokens come from storage."""
    world.serve("first", KEY)
    world.settle()
    world.cache.clear()
    return world.serve("second", KEY).storage_hit_tokens


def assert_registered(store: Registering, world: World, times: int = 1) -> None:
    assert store.registered == [world.host.memory] * times and store.unregistered_calls == 0
    assert len(world.host.memory) == world.host.capacity_bytes


def test_the_first_store_gets_the_host_memory_before_its_first_call() -> None:
    store = Registering()
    world = World(backend=store)
    assert_registered(store, world)
    assert store_and_load(world) > 0
    assert_registered(store, world)


def test_the_store_of_each_epoch_gets_it_from_another_thread_than_the_scheduler() -> None:
    stores: dict[int, Registering] = {}

    def open_storage(epoch: int) -> StorageBackend:
        stores[epoch] = Registering(epoch)
        return GuardedBackend(stores[epoch])

    world = World(backend=open_storage(0), open_storage=open_storage)
    for epoch in (1, 2):
        world.cache.update_weights(epoch)
        until_open(world)
        assert store_and_load(world) > 0
        assert_registered(stores[epoch], world)
        assert stores[epoch].threads != [threading.current_thread()]


def test_an_attached_store_gets_the_host_memory() -> None:
    store, world = Registering(), World()
    world.cache.storage.attach(lambda epoch: store)
    until_open(world)
    assert store_and_load(world) > 0
    assert_registered(store, world)
    assert store.threads != [threading.current_thread()]


def behind_a_limit(store: StorageBackend) -> StorageBackend:
    def raise_unlistable() -> Any:
        raise BackendError("this store cannot be listed")

    return LimitedBackend(store, raise_unlistable, capacity_bytes=1 << 30)


@pytest.mark.parametrize(
    "wrap",
    [
        behind_a_limit,
        lambda store: GuardedBackend(behind_a_limit(store)),
        lambda store: LevelsBackend(
            store.codec,
            [Part("top", MemoryBackend(store.codec)), Part("low", GuardedBackend(store))],
        ),
    ],
    ids=["limit", "guard and limit", "levels"],
)
def test_a_store_gets_the_host_memory_through_its_wrappers(wrap: Callable[[Registering], StorageBackend]) -> None:
    store = Registering()
    world = World(backend=wrap(store))
    assert_registered(store, world)


@pytest.mark.parametrize("error", [BackendError("too little memory may be locked; raise ulimit -l"), KeyError("bug")])
def test_a_guarded_store_that_cannot_register_is_used_and_the_error_is_counted(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Registering(error=error)
    guard = GuardedBackend(store, GuardConfig(), name="fast")
    world = World(backend=guard)
    assert store_and_load(world) > 0
    kind = "registration" if isinstance(error, BackendError) else "KeyError"
    assert guard.statistics().errors == {f"raised_{kind}": 1}
    assert "storage fast" in caplog.text and str(error) in caplog.text


def test_a_store_without_a_guard_that_cannot_register_is_closed_and_opened_again() -> None:
    stores = [Registering(error=BackendError("no"))]

    def open_storage(epoch: int) -> StorageBackend:
        stores.append(Registering(epoch, error=BackendError("no") if len(stores) == 1 else None))
        return stores[-1]

    with pytest.raises(BackendError, match="no"):
        World(backend=stores[0])
    world = World()
    world.cache.storage.attach(open_storage)
    until_open(world)
    assert world.controller.statistics().open_failures == 1
    assert stores[1].closes == 1 and world.controller.backend is stores[2]
    assert_registered(stores[2], world)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as server:
        yield server


def exhausted(master: MooncakeMaster, epoch: int) -> MooncakeBackend:
    """Return a backend without free staging memory: it can move only frames in registered memory."""
    backend = open_backend(master, codec(epoch), staging=codec(epoch).frame_bytes)
    assert len(backend._sessions.current.paths.take(1, 0.0)) == 1
    return backend


def release(backend: StorageBackend | None) -> None:
    assert backend is not None
    (leaf,) = leaves(backend)
    assert isinstance(leaf, MooncakeBackend)
    leaf._sessions.current.paths.give_back([0])


def test_mooncake_moves_the_pages_of_the_host_pool_without_staging(master: MooncakeMaster) -> None:
    def open_storage(epoch: int) -> StorageBackend:
        return GuardedBackend(exhausted(master, epoch), GuardConfig(read="on", write="on"))

    world = World(backend=open_storage(0), open_storage=open_storage)
    assert store_and_load(world) > 0
    release(world.controller.backend)
    world.cache.update_weights(1)
    until_open(world)
    assert store_and_load(world) > 0
    release(world.controller.backend)


def test_mooncake_cannot_move_unregistered_pages_without_staging(master: MooncakeMaster) -> None:
    """The control of the test above."""
    backend = exhausted(master, 0)
    frames = [memoryview(bytearray(backend.codec.frame_bytes))]
    assert backend.batch_set([bytes(32)], frames, parent=None, deadline=soon(0.2)) == [SetOutcome.ERROR]
    assert backend.statistics().errors == {"no_buffer": 1}
    release(backend)
    backend.close()
