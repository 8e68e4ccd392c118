"""New weights, at any moment: nothing of an earlier epoch is served or stored afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hicache.backends.base import StorageBackend
from hicache.backends.memory import MemoryBackend
from hicache.cache import RequestKV
from hicache.errors import BackendError, InvalidInput
from hicache.frame import FrameCodec
from hicache.keys import RadixKey
from tests.cache.world import GEOMETRY, NAMESPACE, GatedBackend, LastingBackend, World, prompt

KEY = prompt(1, 2, 3)


class Stores:
    """The stores of all epochs, as one server would hold them."""

    def __init__(self, kind: type[MemoryBackend] = LastingBackend) -> None:
        self.kind = kind
        self.by_epoch: dict[int, MemoryBackend] = {}

    def open(self, epoch: int) -> StorageBackend:
        if epoch not in self.by_epoch:
            digest = dataclasses.replace(NAMESPACE, weights_epoch=epoch).digest
            self.by_epoch[epoch] = self.kind(FrameCodec(digest, GEOMETRY.payload_bytes))
        return self.by_epoch[epoch]

    def pages(self, epoch: int) -> int:
        return self.by_epoch[epoch].usage().pages if epoch in self.by_epoch else 0


def world_of(stores: Stores) -> World:
    return World(backend=stores.open(0), open_storage=stores.open)


def until_open(world: World) -> None:
    world.until(lambda: world.controller.backend is not None)


def test_after_an_update_no_tier_knows_the_old_pages() -> None:
    stores = Stores()
    world = world_of(stores)
    world.serve("a", KEY)
    world.settle()
    assert stores.pages(0) == 3
    world.cache.update_weights(1)
    until_open(world)
    assert world.serve("b", KEY).cached_tokens == 0
    world.settle()
    assert stores.pages(1) == 3
    assert world.cache.statistics().weights_epoch == 1
    world.close()


def test_a_running_request_keeps_its_pages_and_shares_none() -> None:
    world = World()
    world.serve("a", prompt(1, 2))
    request = world.begin("b", KEY)
    assert request is not None and request.device_hit_tokens == 8
    world.cache.update_weights(1)
    world.cache.check()
    world.compare(KEY, request.pages[:2])
    assert world.cache.extend(request, 20)
    world.cache.cache_unfinished_req(request, KEY)
    assert len(world.cache.match_prefix(KEY).device_pages) == 0
    world.cache.cache_finished_req(request, KEY)
    world.settle()
    assert world.device.allocator.used_pages == 0
    assert len(world.cache.match_prefix(KEY).device_pages) == 0
    world.close()


def test_a_store_under_way_does_not_reach_the_new_epoch() -> None:
    stores = Stores(GatedBackend)
    world, store = world_of(stores), stores.open(0)
    assert isinstance(store, GatedBackend)
    store.writes.clear()
    world.serve("a", KEY)
    world.until(store.entered.is_set)
    world.cache.update_weights(1)
    world.serve("b", prompt(7, 8))
    store.writes.set()
    world.settle()
    until_open(world)
    assert stores.pages(1) == 0
    world.close()


def test_a_prefetch_under_way_shows_nothing() -> None:
    stores = Stores()
    first = world_of(stores)
    first.serve("a", KEY)
    first.settle()
    second = world_of(stores)
    second.cache.prefetch_from_storage("b", KEY)
    second.cache.update_weights(1)
    assert second.cache.check_prefetch_progress("b")
    request = second.begin("b", KEY)
    assert request is not None and request.cached_tokens == 0
    second.cache.cache_finished_req(request, None)
    second.settle()
    assert second.host.allocator.used_pages == 0
    second.close()
    first.close()


def test_storage_that_cannot_be_opened_anew_refuses_the_update() -> None:
    world = World(backend=Stores().open(0))
    world.serve("a", KEY)
    with pytest.raises(InvalidInput, match="open_storage"):
        world.cache.update_weights(1)
    assert len(world.cache.match_prefix(KEY).device_pages) == 3
    world.close()


def test_a_store_that_does_not_open_costs_hits_only_and_is_tried_again() -> None:
    stores = Stores()
    failures = [BackendError("not yet"), BackendError("not yet")]

    def open_storage(epoch: int) -> StorageBackend:
        if failures:
            raise failures.pop()
        return stores.open(epoch)

    world = World(backend=stores.open(0), open_storage=open_storage)
    world.cache.update_weights(1)
    assert world.serve("a", KEY).cached_tokens == 0
    until_open(world)
    assert world.cache.statistics().controller.open_failures == 2
    world.serve("b", KEY)
    world.settle()
    assert stores.pages(1) == 3
    world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_opening_that_ends_its_thread_is_tried_again() -> None:
    stores = Stores()
    ends: list[BaseException] = [SystemExit()]

    def open_storage(epoch: int) -> StorageBackend:
        if ends:
            raise ends.pop()
        return stores.open(epoch)

    world = World(backend=stores.open(0), open_storage=open_storage)
    world.cache.update_weights(1)
    until_open(world)
    assert world.cache.statistics().controller.open_failures == 1
    world.close()


def test_only_the_newest_of_several_updates_counts() -> None:
    stores = Stores()
    world = world_of(stores)
    for epoch in (1, 2, 3):
        world.cache.update_weights(epoch)
    until_open(world)
    assert world.controller.backend is stores.open(3)
    world.close()


def test_the_old_backend_is_closed_once_it_is_idle() -> None:
    closed: list[int] = []

    class Closing(MemoryBackend):
        def close(self) -> None:
            closed.append(id(self))
            super().close()

    stores = Stores(Closing)
    world = world_of(stores)
    old = id(stores.open(0))
    world.serve("a", KEY)
    world.cache.update_weights(1)
    world.until(lambda: closed == [old])
    until_open(world)
    world.close()
    assert closed == [old, id(stores.open(1))]


def _copying(world: World, request: RequestKV, key: RadixKey) -> None:
    world.cache.cache_unfinished_req(request, key)
    world.cache.poll()


def _storing(world: World, request: RequestKV, key: RadixKey) -> None:
    world.cache.cache_unfinished_req(request, key)
    world.until(lambda: world.controller.statistics().written_pages > 0)


STAGES: dict[str, Callable[[World, RequestKV, RadixKey], None]] = {
    "begun": lambda w, r, k: None,
    "shared": lambda w, r, k: w.cache.cache_unfinished_req(r, k.head(4)),
    "copying": _copying,
    "storing": _storing,
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_at_any_stage_leaves_the_books_right(stage: str) -> None:
    stores = Stores()
    world = world_of(stores)
    request = world.begin("a", KEY)
    assert request is not None
    STAGES[stage](world, request, KEY)
    world.cache.update_weights(1)
    world.cache.check()
    until_open(world)
    again = world.begin("b", KEY)
    assert again is not None and again.cached_tokens == 0
    world.cache.cache_finished_req(again, KEY)
    world.cache.cache_finished_req(request, KEY)
    world.settle()
    world.cache.check()
    assert stores.pages(1) == 3
    world.close()


def test_a_load_that_was_submitted_for_old_weights_ends_with_its_request() -> None:
    world = World()
    world.serve("a", KEY)
    world.settle()
    world.cache.evict(100)
    request = world.cache.begin_request("b", KEY)
    assert request is not None and request.host_hit_tokens == 12
    world.cache.update_weights(1)
    world.cache.start_loading()
    world.cache.cache_finished_req(request, None)
    world.settle()
    assert world.device.allocator.used_pages == world.host.allocator.used_pages == 0
    world.close()
