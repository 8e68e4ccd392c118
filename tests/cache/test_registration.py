"""Stores get the memory of the host pool before their first call, and not on the scheduler thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.compose import Levels, Part
from hicache.backends.limit import CapacityLimit
from hicache.backends.memory import MemoryDriver
from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.backends.stored import StoredPages
from hicache.errors import BackendError
from hicache_lab.conformance import bare, driver_of, memory_store, soon
from hicache_lab.devservers import MooncakeMaster
from tests.backends.mooncake.store import open_backend
from tests.cache.world import LastingBackend, World, codec, prompt

KEY = prompt(1, 2, 3)


class Registering(MemoryDriver):
    """A driver that records registrations of memory, their threads, and the calls before the first one."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.registered: list[memoryview] = []
        self.threads: list[threading.Thread] = []
        self.unregistered_calls = 0
        self._error = error

    def register_memory(self, memory: memoryview) -> None:
        if self._error is not None:
            raise self._error
        self.registered.append(memory)
        self.threads.append(threading.current_thread())

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.unregistered_calls += not self.registered
        return super().find(namespace, keys, deadline)

    def read(self, pages: PageReads[bytes]) -> None:
        self.unregistered_calls += not self.registered
        super().read(pages)

    def write(self, pages: PageWrites) -> None:
        self.unregistered_calls += not self.registered
        super().write(pages)


class Refusing(LastingBackend):
    """Storage that raises when it gets memory."""

    closes = 0

    def register_memory(self, memory: memoryview) -> None:
        raise BackendError("no")

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
    world = World(backend=bare(store, codec()))
    assert_registered(store, world)
    assert store_and_load(world) > 0
    assert_registered(store, world)


def test_the_store_of_each_epoch_gets_it_from_another_thread_than_the_scheduler() -> None:
    stores: dict[int, Registering] = {}

    def open_storage(epoch: int) -> Storage:
        stores[epoch] = Registering()
        return Store(stores[epoch], codec(epoch))

    world = World(backend=open_storage(0), open_storage=open_storage)
    for epoch in (1, 2):
        world.cache.update_weights(epoch)
        until_open(world)
        assert store_and_load(world) > 0
        assert_registered(stores[epoch], world)
        assert stores[epoch].threads != [threading.current_thread()]


def behind_a_limit(driver: Registering) -> Storage:
    limit = CapacityLimit(codec(), StoredPages(driver, "memory"), capacity_bytes=1 << 30)
    return Store(driver, codec(), limit=limit)


def on_a_lower_level(driver: Registering) -> Storage:
    return Levels(codec(), [Part("top", memory_store(codec())), Part("low", Store(driver, codec()))])


@pytest.mark.parametrize("place", [behind_a_limit, on_a_lower_level])
def test_a_store_gets_the_host_memory_wherever_it_is(place: Callable[[Registering], Storage]) -> None:
    store = Registering()
    world = World(backend=place(store))
    assert_registered(store, world)


@pytest.mark.parametrize("error", [BackendError("too little memory may be locked; raise ulimit -l"), KeyError("bug")])
def test_a_store_that_cannot_register_is_used_and_the_error_is_counted(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(Registering(error), codec(), name="fast")
    world = World(backend=store)
    assert store_and_load(world) > 0
    kind = "registration" if isinstance(error, BackendError) else "KeyError"
    assert store.statistics().errors == {f"raised_{kind}": 1}
    assert "storage fast" in caplog.text and str(error) in caplog.text


def test_storage_that_raises_when_it_gets_memory_is_closed_and_opened_again() -> None:
    refusing, store = Refusing(codec()), Registering()
    opened: list[Storage] = [bare(store, codec()), refusing]

    with pytest.raises(BackendError, match="no"):
        World(backend=Refusing(codec()))
    world = World()
    world.cache.storage.attach(lambda epoch: opened.pop())
    until_open(world)
    assert world.controller.statistics().open_failures == 1
    assert refusing.closes == 1 and not opened
    assert_registered(store, world)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as server:
        yield server


def exhausted(master: MooncakeMaster, epoch: int) -> Storage:
    """Return a store without free staging memory: it can move only frames in registered memory."""
    store = open_backend(master, codec(epoch), staging=codec(epoch).frame_bytes)
    assert len(driver_of(store, MooncakeDriver)._sessions.current.paths.take(1, 0.0)) == 1
    return store


def release(storage: Storage | None) -> None:
    assert storage is not None
    driver_of(storage, MooncakeDriver)._sessions.current.paths.give_back([0])


def test_mooncake_moves_the_pages_of_the_host_pool_without_staging(master: MooncakeMaster) -> None:
    world = World(backend=exhausted(master, 0), open_storage=lambda epoch: exhausted(master, epoch))
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
