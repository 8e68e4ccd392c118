"""After new weights, pages of earlier epochs are neither served nor stored."""

from __future__ import annotations

import pytest

from hicache.backends.storage import Storage
from hicache.errors import BackendError, InvalidInput
from tests.cache.world import LastingBackend, World, codec, prompt

KEY = prompt(1, 2, 3)


class Stores:
    """The stores of all epochs, like those of one server."""

    def __init__(self, kind: type[LastingBackend] = LastingBackend) -> None:
        self.kind = kind
        self.by_epoch: dict[int, LastingBackend] = {}

    def open(self, epoch: int) -> Storage:
        if epoch not in self.by_epoch:
            self.by_epoch[epoch] = self.kind(codec(epoch))
        return self.by_epoch[epoch]

    def pages(self, epoch: int) -> int:
        return self.by_epoch[epoch].usage().pages if epoch in self.by_epoch else 0


def world_of(stores: Stores) -> World:
    return World(backend=stores.open(0), open_storage=stores.open)


def until_open(world: World) -> None:
    world.until(lambda: world.controller.backend is not None)


def test_after_an_update_no_tier_has_the_old_pages() -> None:
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


def test_an_update_is_rejected_if_storage_cannot_be_reopened() -> None:
    world = World(backend=Stores().open(0))
    world.serve("a", KEY)
    with pytest.raises(InvalidInput, match="open_storage"):
        world.cache.update_weights(1)
    assert len(world.cache.match_prefix(KEY).device_pages) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failures", [[BackendError("not yet"), BackendError("not yet")], [SystemExit()]], ids=len)
def test_a_store_that_does_not_open_costs_only_hits_and_is_retried(failures: list[BaseException]) -> None:
    """Also if the opening ends its thread."""
    stores, left = Stores(), failures[:]

    def open_storage(epoch: int) -> Storage:
        if left:
            raise left.pop()
        return stores.open(epoch)

    world = World(backend=stores.open(0), open_storage=open_storage)
    world.cache.update_weights(1)
    assert world.serve("a", KEY).cached_tokens == 0
    until_open(world)
    assert world.cache.statistics().controller.open_failures == len(failures)
    world.serve("b", KEY)
    world.settle()
    assert stores.pages(1) == 3


def test_of_several_updates_only_the_newest_counts() -> None:
    stores = Stores()
    world = world_of(stores)
    for epoch in (1, 2, 3):
        world.cache.update_weights(epoch)
    until_open(world)
    assert world.controller.backend is stores.open(3)


def test_the_old_backend_is_closed_when_it_is_idle() -> None:
    closed: list[int] = []

    class Closing(LastingBackend):
        def close(self) -> None:
            closed.append(id(self))
            self.inner.close()

    stores = Stores(Closing)
    world = world_of(stores)
    old = id(stores.open(0))
    world.serve("a", KEY)
    world.cache.update_weights(1)
    world.until(lambda: closed == [old])
    until_open(world)
    world.close()
    assert closed == [old, id(stores.open(1))]
