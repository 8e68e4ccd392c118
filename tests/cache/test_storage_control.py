"""Storage is detached, attached and replaced at run time, with operations in flight."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hicache.backends.base import Direction, SetOutcome
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.guard import GuardConfig
from hicache.errors import BackendError, InvalidInput
from hicache_lab.faults import FaultyDriver
from tests.cache.world import LastingDriver, World, codec, prompt
from tests.tuned import tuned
from tests.waiting import wait_for

KEY = prompt(1, 2, 3)
READ, WRITE = Direction.READ, Direction.WRITE


class Server:
    """The pages of all epochs. They stay when an engine closes its store; each call of `open` adds a new store."""

    def __init__(self, options: GuardConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self._options = options or tuned(GuardConfig, backoff_min=0.02, backoff_max=0.05, retry_share=0.0)
        self.by_epoch: dict[int, LastingDriver] = {}
        self.faults: list[FaultyDriver] = []
        self.stores: list[Store] = []
        self.down = False

    def open(self, epoch: int) -> Storage:
        if self.down:
            raise BackendError("the server is down")
        driver = self.by_epoch.setdefault(epoch, LastingDriver())
        self.faults.append(FaultyDriver(driver))
        self.stores.append(Store(self.faults[-1], codec(epoch), self._options, clock=self.clock))
        return self.stores[-1]

    def pages(self, epoch: int = 0) -> int:
        return self.by_epoch[epoch].measure().pages if epoch in self.by_epoch else 0


def world_of(server: Server) -> World:
    return World(backend=server.open(0), open_storage=server.open, clock=server.clock)


def until_open(world: World) -> None:
    world.until(lambda: world.controller.backend is not None)
    world.step()


def forget_l1_and_l2(world: World) -> None:
    """Clear L1 and L2, so that only storage has pages, as after a restart."""
    world.settle()
    world.cache.clear()


def hits_from_storage(world: World, rid: str) -> int:
    """Serve a request; return how many of its tokens come from storage."""
    return world.serve(rid, KEY).storage_hit_tokens


def served() -> tuple[Server, World]:
    """Return a server and a world that has stored KEY there."""
    server = Server()
    world = world_of(server)
    world.serve("a", KEY)
    world.settle()
    return server, world


def test_a_cache_with_detached_storage_works_without_reads_and_stores() -> None:
    server, world = served()
    world.cache.storage.detach()
    assert not world.cache.storage.attached
    assert world.serve("b", KEY).cached_tokens == 12, "L1 has not changed"
    world.serve("c", prompt(4, 5))
    forget_l1_and_l2(world)
    assert hits_from_storage(world, "d") == 0
    assert server.pages() == 3


def test_storage_that_is_attached_again_is_used_again() -> None:
    server, world = served()
    world.cache.storage.detach()
    world.cache.storage.detach()  # does nothing
    world.serve("b", prompt(4, 5))
    world.cache.storage.attach()
    until_open(world)
    world.serve("c", prompt(4, 5))
    forget_l1_and_l2(world)
    assert server.pages() == 5, "pages that were computed without storage are stored at their next use"
    assert hits_from_storage(world, "d") == 12


def test_another_store_gets_the_pages_of_the_first_one() -> None:
    first, second = Server(), Server()
    world = world_of(first)
    world.serve("a", KEY)
    world.settle()
    world.cache.storage.attach(second.open)
    until_open(world)
    world.serve("b", KEY)
    world.settle()
    assert (first.pages(), second.pages()) == (3, 3)
    world.cache.update_weights(1)
    until_open(world)
    world.serve("c", KEY)
    world.settle()
    assert (first.pages(1), second.pages(1)) == (0, 3), "later epochs are opened with the attached opener"


def test_storage_can_be_attached_to_a_cache_that_started_without_it() -> None:
    server = Server()
    world = World()
    with pytest.raises(InvalidInput, match="without storage"):
        world.cache.storage.attach()
    world.serve("a", KEY)
    world.cache.storage.attach(server.open)
    until_open(world)
    world.serve("b", KEY)
    forget_l1_and_l2(world)
    assert server.pages() == 3
    assert hits_from_storage(world, "c") == 12


def test_new_weights_leave_a_detached_store_detached() -> None:
    server = Server()
    world = world_of(server)
    world.cache.storage.detach()
    world.cache.update_weights(1)
    for _ in range(20):
        world.step()
    assert not world.cache.storage.attached and world.controller.backend is None
    assert 1 not in server.by_epoch
    world.cache.storage.attach()
    until_open(world)
    world.serve("a", KEY)
    world.settle()
    assert server.pages(1) == 3


def test_a_store_that_opens_after_a_detach_is_closed() -> None:
    server = Server()
    world = world_of(server)
    gate, opened = threading.Event(), threading.Event()

    def open_late(epoch: int) -> Storage:
        gate.wait(20)
        backend = server.open(epoch)
        opened.set()
        return backend

    world.cache.storage.attach(open_late)
    world.step()
    world.cache.storage.detach()
    gate.set()
    world.until(opened.is_set)
    world.until(server.stores[-1]._closing.is_set)
    assert world.controller.backend is None


def _raises(epoch: int) -> Storage:
    raise RuntimeError("a bug of the factory")


def _returns_none(epoch: int) -> Storage:
    return None  # type: ignore[return-value]


def _returns_a_number(epoch: int) -> Storage:
    return 5  # type: ignore[return-value]


@pytest.mark.parametrize("opener", [_raises, _returns_none, _returns_a_number, lambda: 5, int])
def test_after_an_opener_that_fails_the_configured_store_can_be_attached(opener: Any) -> None:
    server = Server()
    world = world_of(server)
    world.cache.storage.attach(opener)
    world.until(lambda: world.cache.statistics().controller.open_failures > 0)
    assert world.cache.storage.attached and world.controller.backend is None
    assert world.serve("a", prompt(7, 8)).cached_tokens == 0, "requests work without storage"
    world.settle()  # otherwise its pages may reach L2 after the store is open
    world.cache.storage.attach()
    until_open(world)
    world.serve("b", KEY)
    world.settle()
    assert server.pages() == 3
    world.cache.update_weights(1)
    until_open(world)
    assert 1 in server.by_epoch


@pytest.mark.parametrize("opener", [5, "file"])
def test_an_opener_that_is_not_callable_is_rejected(opener: Any) -> None:
    with pytest.raises(InvalidInput, match="open_storage"):
        World(open_storage=opener)


def test_an_invalid_weights_epoch_leaves_the_store_open() -> None:
    server = Server()
    world = world_of(server)
    for epoch in (0, 2**64):
        with pytest.raises(InvalidInput, match="weights epoch"):
            world.cache.update_weights(epoch)
    world.cache.update_weights(2**64 - 1)
    until_open(world)
    world.serve("a", KEY)
    world.settle()
    assert (server.pages(0), server.pages(2**64 - 1)) == (0, 3)


# Operations in flight


def test_a_prefetch_in_flight_at_a_detach_adds_no_pages_and_holds_none() -> None:
    server, world = served()
    world.cache.clear()
    server.faults[0].hang()
    assert world.cache.prefetch_from_storage("b", KEY)
    wait_for(lambda: server.faults[0].hung_calls == 1)
    world.cache.storage.detach()
    assert world.cache.check_prefetch_progress("b"), "the request does not wait any more"
    assert world.attempt("b", KEY).cached_tokens == 0
    assert not server.stores[0]._closing.is_set(), "it is not closed during a call"
    server.faults[0].release()
    world.settle()
    world.until(server.stores[0]._closing.is_set)
    assert world.host.allocator.used_pages == 0


# Breaker and overrides


def test_statistics_have_an_entry_for_each_store_and_do_not_wait_for_it() -> None:
    _, world = served()
    (leaf,) = world.cache.statistics().controller.backends
    assert leaf.name == "storage" and leaf.guard is not None
    assert leaf.statistics.sets[SetOutcome.STORED] == 3
    wait_for(lambda: (usage := world.cache.statistics().controller.usage) is not None and usage.pages == 3)
    world.cache.storage.detach()
    assert world.cache.statistics().controller.backends == ()


def test_a_closed_cache_does_not_open_storage() -> None:
    server = Server()
    for world in (world_of(server), World(open_storage=server.open)):
        world.close()
        opened, threads = len(server.stores), set(threading.enumerate())
        with pytest.raises(InvalidInput, match="closed"):
            world.cache.storage.attach(server.open)
        world.cache.update_weights(1)
        world.cache.poll()
        assert len(server.stores) == opened and set(threading.enumerate()) <= threads
