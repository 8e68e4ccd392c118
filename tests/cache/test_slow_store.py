"""A store that is slower than the engine: waiting stores must not cost hits on L2."""

from __future__ import annotations

import threading

from hicache.cache import HiRadixCache
from hicache.config import TransferConfig
from hicache.controller import RankGroup
from hicache.keys import RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, World, filled, memory_backend, prompt
from tests.ranks import gloo_ranks

# All of L2 may wait to be stored.
ALL = TransferConfig(store_host_share=1.0)
HOST_PAGES = 12


class Gated(GatedBackend):
    """A store whose writes wait until the test sets `writes`."""

    def __init__(self) -> None:
        super().__init__()
        self.writes.clear()

    def holds(self, key: RadixKey) -> int:
        """Return how many leading pages are stored."""
        return self.batch_exists(key.page_keys(4, b"", 0, key.pages(4)), deadline=1e12)


def pair(number: int) -> RadixKey:
    """Return a prompt of two pages."""
    return prompt(number, 100 + number)


def compute(world: World, key: RadixKey, *, leaves_l1: bool = True) -> None:
    """Serve a prompt and wait until it is on L2; with `leaves_l1`, evict it from L1."""
    written = world.controller.statistics().written_pages + key.pages(4) - world.cache.tree.peek(key).host_pages
    world.serve(f"compute-{key.tokens[0]}", key)
    world.until(lambda: world.controller.statistics().written_pages >= written)
    if leaves_l1:
        world.cache.evict(100)


def full_world(
    backend: Gated | None = None, *, leaves_l1: bool = True, ranks: RankGroup | None = None
) -> tuple[Gated, World]:
    """Return a store, and a world whose L2 is full with six runs of two pages. A worker stores the first; the others
    wait."""
    backend = backend or Gated()
    world = World(backend=backend, host_pages=HOST_PAGES, transfer=ALL, ranks=ranks)
    for number in range(1, 7):
        compute(world, pair(number), leaves_l1=leaves_l1)
    world.until(backend.entered.is_set)
    assert world.controller.store_pages == HOST_PAGES
    return backend, world


def on_l2(cache: HiRadixCache, key: RadixKey) -> int:
    return cache.tree.peek(key).host_pages


def test_a_backup_without_room_cancels_the_newest_waiting_store() -> None:
    backend, world = full_world()
    compute(world, pair(7))
    assert world.skipped["store_gave_way"] == 1 and "backup_no_host_room" not in world.skipped
    assert [on_l2(world.cache, pair(number)) for number in range(1, 8)] == [2, 2, 2, 2, 2, 0, 2]
    assert world.serve("again", pair(2)).host_hit_tokens == 8
    backend.writes.set()
    world.settle()
    assert [backend.holds(pair(number)) for number in range(1, 8)] == [2, 2, 2, 2, 2, 0, 2]
    compute(world, pair(6))
    world.settle()
    assert backend.holds(pair(6)) == 2


def test_a_page_whose_store_was_cancelled_is_stored_at_its_next_use() -> None:
    backend = Gated()
    world = World(backend=backend, host_pages=6, transfer=ALL)
    compute(world, pair(1))
    compute(world, prompt(2, 3, 4, 5))
    world.cache.match_prefix(prompt(2, 3, tail=0))  # splits its run into two nodes of one store
    world.until(backend.entered.is_set)
    compute(world, pair(6))
    assert on_l2(world.cache, prompt(2, 3, 4, 5)) == 2
    assert world.skipped["store_gave_way"] == 1
    backend.writes.set()
    world.settle()
    assert backend.holds(prompt(2, 3)) == 0
    assert world.serve("again", prompt(2, 3)).host_hit_tokens == 8
    world.settle()
    assert backend.holds(prompt(2, 3)) == 2


def test_a_store_is_cancelled_after_all_stores_that_continue_its_chain() -> None:
    backend = Gated()
    world = World(backend=backend, host_pages=10, transfer=ALL)
    compute(world, pair(1))
    compute(world, prompt(2, 3))
    compute(world, prompt(2, 3, 4, 5))
    compute(world, prompt(2, 3, 4, 5, 6, 7))
    world.until(backend.entered.is_set)
    assert world.controller.store_pages == 8
    compute(world, prompt(11, 12, 13, 14, 15, 16))  # two pages are free; needs those of two more runs
    assert world.skipped["store_gave_way"] == 2
    assert on_l2(world.cache, prompt(2, 3, 4, 5, 6, 7)) == 2
    backend.writes.set()
    world.settle()
    assert backend.holds(prompt(2, 3, 4, 5, 6, 7)) == 2
    assert backend.usage().pages == 10


def test_a_cancelled_store_of_pages_on_l1_is_repeated_at_their_next_use() -> None:
    backend, world = full_world(leaves_l1=False)
    compute(world, pair(7), leaves_l1=False)
    assert world.skipped["store_gave_way"] == 1 and "backup_no_host_room" not in world.skipped
    backend.writes.set()
    world.settle()
    assert [backend.holds(pair(number)) for number in (5, 6, 7)] == [2, 0, 2]
    assert world.serve("again", pair(6)).device_hit_tokens == 8
    world.settle()
    assert backend.holds(pair(6)) == 2


def test_a_prefetch_without_room_cancels_a_store() -> None:
    backend = Gated()
    backend.writes.set()
    filled(backend, pair(9)).writes.clear()
    _, world = full_world(backend)
    assert world.serve("prefetched", pair(9)).storage_hit_tokens == 8
    assert world.skipped["store_gave_way"] == 1 and "prefetch_no_host_room" not in world.skipped
    backend.writes.set()


def test_a_write_of_a_host_cache_without_room_cancels_a_store() -> None:
    backend = Gated()
    world = HostWorld(backend=backend, host_pages=HOST_PAGES, transfer=ALL)
    for number in range(1, 7):
        world.write(f"r{number}", prompt(number, 100 + number, tail=0))
    world.until(backend.entered.is_set)
    world.write("r7", prompt(7, 107, tail=0))
    assert world.skipped == {"store_gave_way": 1}
    assert [world.load(f"s{n}", prompt(n, 100 + n, tail=0)) for n in range(1, 8)] == [2, 2, 2, 2, 2, 0, 2]
    backend.writes.set()


def test_the_store_of_a_pinned_run_is_not_cancelled() -> None:
    backend, world = full_world()
    pin = world.cache.pin(pair(6), ttl_s=1000.0)
    assert pin is not None
    compute(world, pair(7))
    assert world.skipped["store_gave_way"] == 1
    assert [on_l2(world.cache, pair(number)) for number in (5, 6, 7)] == [0, 2, 2]
    backend.writes.set()
    world.settle()
    assert [backend.holds(pair(number)) for number in (5, 6, 7)] == [0, 2, 2]
    pin.release()


def test_stores_are_not_cancelled_if_that_does_not_make_enough_room() -> None:
    backend, world = full_world()
    pins = [world.cache.pin(pair(number), ttl_s=1000.0) for number in (4, 5, 6)]
    assert all(pins)
    world.serve("too long", prompt(*range(30, 42)))
    world.step()
    assert "store_gave_way" not in world.skipped
    backend.writes.set()
    world.settle()
    assert [backend.holds(pair(number)) for number in range(1, 7)] == [2] * 6


def test_with_ranks_stores_are_not_cancelled() -> None:
    backend, world = full_world(ranks=gloo_ranks(1, deadline_s=30.0)[0])
    world.serve("more", pair(7))
    world.step()
    assert world.skipped["backup_no_host_room"] > 0 and "store_gave_way" not in world.skipped
    assert on_l2(world.cache, pair(6)) == 2
    backend.writes.set()


def test_cancelled_stores_leave_the_queue_of_a_store_that_hangs() -> None:
    backend, world = full_world()
    for number in range(10, 60):
        compute(world, pair(number))
    assert world.skipped["store_gave_way"] == 50
    assert world.controller.statistics().queues.backup == 5
    backend.writes.set()


def test_at_most_the_configured_share_of_l2_waits_to_be_stored() -> None:
    backend = Gated()
    world = World(backend=backend, host_pages=32, transfer=TransferConfig(store_host_share=0.25))
    for number in range(1, 11):
        compute(world, pair(number))
    assert world.controller.store_pages == 8
    assert world.controller.statistics().refused["backup"] == 6
    backend.writes.set()


def test_a_quarter_of_l2_may_wait_to_be_stored_unless_configured() -> None:
    for transfer, pages in ((None, 8), (TransferConfig(store_host_share=0.5), 16), (ALL, 32)):
        world = World(backend=memory_backend(), host_pages=32, transfer=transfer)
        world.controller.store_pages = 1
        assert world.controller.takes_store(pages - 1) and not world.controller.takes_store(pages)
        world.controller.store_pages = 0
        world.close()


def test_a_detached_backend_whose_store_was_cancelled_is_closed() -> None:
    closed = threading.Event()

    class Closing(Gated):
        def close(self) -> None:
            closed.set()

    backend, world = full_world(Closing())
    compute(world, pair(7))
    backend.writes.set()
    world.cache.storage.detach()
    world.until(closed.is_set)
