"""Repeated attempts, many pins, long runs and failures neither leak memory nor evict pages without need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.cache.recorder import EventRecorder
from hicache.events import EventStream, Medium
from hicache.radix import Node, PrefixTree
from hicache.tiers import PagedTokenToKVPoolAllocator
from tests.cache.world import GEOMETRY, World, every_hit, filled, memory_backend, prompt


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lru", "filo", "mru"])
def test_eviction_queues_do_not_grow_with_the_number_of_evicted_runs(policy: str) -> None:
    world = World(device_pages=8, host_pages=8, config=every_hit(write_policy="write_back", eviction_policy=policy))
    for number in range(600):
        world.serve(f"r{number}", prompt(1000 + number))
        world.cache.evict(4)
        world.settle()
    assert all(len(queue._heap) < 300 for queue in (world.cache.tree.queues.device, world.cache.tree.queues.host))


def test_released_pins_do_not_use_memory() -> None:
    world = World()
    world.serve("a", prompt(1))
    for _ in range(2000):
        pin = world.cache.pin(prompt(1), ttl_s=3600)
        assert pin is not None
        pin.release()
    assert len(world.cache._pins._timers._heap) < 200


def test_repeated_attempts_during_a_write_back_do_not_evict_more() -> None:
    world = World(device_pages=31, host_pages=64, config=every_hit(write_policy="write_back"))
    for number in range(10):
        world.serve(f"r{number}", prompt(*range(100 * number + 1, 100 * number + 4)))
    for _ in range(9):  # without a poll no copy is acknowledged
        assert world.cache.begin_request("next", prompt(1001, 1002, 1003)) is None
    assert world.cache.writeback_pages == 3
    world.settle()


def test_an_allocation_inside_a_free_group_evicts_nothing() -> None:
    world = World(device_pages=8)
    world.serve("a", prompt(*range(1, 8)))
    world.settle()
    source = world.cache.page_source
    with source.free_group():
        assert source.alloc(4) is None
    assert world.cache.tree.device_pages_total == 7


class NoMemory:
    """Kernels of a device without free memory."""

    def extend_slots(self, *_: object) -> None:
        raise torch.OutOfMemoryError("full")

    def decode_slots(self, *_: object) -> None:
        raise torch.OutOfMemoryError("full")


def test_pages_are_not_lost_when_the_device_has_no_memory_for_their_slots() -> None:
    world = World()
    allocator = PagedTokenToKVPoolAllocator(world.cache.page_source, GEOMETRY.page_size, kernels=NoMemory())
    with pytest.raises(torch.OutOfMemoryError):
        allocator.alloc_extend(torch.tensor([0]), torch.tensor([9]), torch.tensor([-1]), 9)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.alloc_decode(torch.tensor([1]), torch.tensor([-1]))
    world.cache.check()
    assert world.device.allocator.used_pages == 0


def test_a_request_does_not_exchange_its_pages_for_pages_that_are_being_loaded() -> None:
    world = World(device_pages=32, config=every_hit(load_back_threshold_tokens=12))
    world.serve("store", prompt(1, 2, 3))
    world.leave_l1()
    own = world.begin("a", prompt(1, 2))  # the hit is too short to be loaded, so it is computed
    assert own.cached_tokens == 0
    pages = own.pages.copy()
    loading = world.admit("b", prompt(1, 2, 3))
    assert loading.host_hit_tokens == 12
    world.cache.cache_unfinished_req(own, prompt(1, 2))
    assert np.array_equal(own.pages, pages)
    world.cache.start_loading()
    world.settle()
    world.cache.cache_unfinished_req(own, prompt(1, 2))
    assert np.array_equal(own.pages[:2], loading.pages[:2])
    for request in (own, loading):
        world.cache.cache_finished_req(request, None)


def test_a_head_whose_store_failed_is_stored_again_although_its_descendants_are_stored() -> None:
    world = World(backend=filled(memory_backend(), prompt(1, 2, 3)))
    world.serve("b", prompt(1, 2, 3))
    world.settle()
    head = next(node for node in world.cache.tree.nodes() if node.parent is not None and node.parent.parent is None)
    world.cache.tree.stored.unmark(head)
    world.cache.tree.observer = observer = Observer()
    world.serve("c", prompt(1, 2, 3, 4))
    world.settle()
    assert head.id in observer.stored_nodes


class Observer(EventRecorder):
    """Records which nodes were stored."""

    def __init__(self) -> None:
        super().__init__(EventStream(1 << 20))
        self.stored_nodes: list[int] = []

    def stored(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        if medium is Medium.STORAGE:
            self.stored_nodes.append(node.id)
