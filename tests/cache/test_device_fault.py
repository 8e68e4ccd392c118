"""After a failed copy on the device, requests do not get pages of the tree that may be unfilled."""

from __future__ import annotations

import pytest

from hicache.config import HiCacheConfig, PrefetchConfig
from hicache.errors import TransferError
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.world import World, prompt

# Three pages: a shorter prefix is computed although L2 has it.
OPTIONS = HiCacheConfig(load_back_threshold_tokens=12, prefetch=PrefetchConfig(threshold_tokens=4))


class _BrokenLoads(CpuCopyEngine):
    """A copy engine whose loads fail on the device."""

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        raise OSError("device lost")


@pytest.fixture
def world() -> World:
    """Return a world whose L2 has a prompt and whose loads fail."""
    world = World(copies=_BrokenLoads, config=OPTIONS)
    world.serve("first", prompt(1, 2, 3, 4))
    world.leave_l1()
    return world


def test_a_request_that_began_before_a_load_failed_gets_the_error_at_its_forward(world: World) -> None:
    aborted = world.admit("aborted", prompt(1, 2, 3, 4))
    load = world.cache.start_loading()
    assert load is not None
    world.cache.cache_finished_req(aborted, None)
    request = world.admit("late", prompt(1, 2, 3, 4))
    assert request.shared_pages == 4, "the pages count as present on L1"
    world.settle()
    transfer = world.cache.start_loading()
    assert transfer is not None
    with pytest.raises(TransferError):
        transfer.wait_layer(0)
    with pytest.raises(TransferError):
        world.device.wait_layer(0)
    world.cache.cache_finished_req(request, None)
    assert world.cache.start_loading() is None
    world.device.wait_layer(0)


def test_a_running_request_keeps_its_own_pages_after_a_failed_load(world: World) -> None:
    running = world.begin("running", prompt(1, 2, 9))
    assert running.shared_pages == 0, "the prefix on L2 is too short to load"
    loading = world.admit("loading", prompt(1, 2, 3, 4))
    transfer = world.cache.start_loading()
    assert transfer is not None
    with pytest.raises(TransferError):
        transfer.wait_layer(0)
    world.cache.cache_finished_req(loading, None)
    world.settle()
    world.cache.cache_unfinished_req(running, prompt(1, 2, 9))
    world.compare(prompt(1, 2, 9), running.pages[:3])
    world.cache.cache_finished_req(running, prompt(1, 2, 9))


class _BrokenBackups(CpuCopyEngine):
    """A copy engine whose copies to L2 fail on the device."""

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        raise OSError("device lost")


def test_a_pinned_prefix_that_could_not_be_copied_stays_on_l1() -> None:
    world = World(copies=_BrokenBackups, config=OPTIONS)
    world.serve("first", prompt(1, 2))
    pin = world.cache.pin(prompt(1, 2), ttl_s=60)
    world.settle()
    assert world.cache.evict(100).freed_pages == 0
    world.cache.check()
    assert pin is not None and world.cache.tree.pinned_pages == 2
    pin.release()
    assert world.cache.evict(100).freed_pages == 2
