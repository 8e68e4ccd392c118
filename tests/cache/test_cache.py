"""The guarantees for an engine: hits from each tier, right bytes, exact counts, and no exceptions from storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hicache.config import HiCacheConfig, PrefetchConfig, TransferConfig
from hicache.errors import InvalidInput, TransferError
from hicache.tiers import Fence, PagedTokenToKVPoolAllocator, Transfer
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices, PageIds
from tests.cache.world import GEOMETRY, World, memory_backend, prompt
from tests.tuned import tuned


@pytest.fixture
def world() -> Iterator[World]:
    w = World(backend=memory_backend())
    yield w
    w.close()


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
def test_a_second_request_hits_the_pages_of_the_first_one_on_each_tier(world: World, tier: str) -> None:
    world.serve("a", prompt(1, 2, 3))
    if tier == "host":
        world.leave_l1()
    if tier == "storage":
        world.forget()
    again = world.serve("b", prompt(1, 2, 3, 4))
    hits = (again.device_hit_tokens, again.host_hit_tokens, again.storage_hit_tokens)
    assert hits == tuple(12 * (name == tier) for name in ("device", "host", "storage"))
    assert world.compared_pages == 3


def test_the_last_token_is_always_computed(world: World) -> None:
    world.serve("a", prompt(1, 2, tail=0))
    again = world.serve("b", prompt(1, 2, tail=0))
    assert again.device_hit_tokens == 4


def test_a_request_shares_its_pages_while_it_runs(world: World) -> None:
    running = world.begin("a", prompt(1, 2, 3))
    world.cache.cache_unfinished_req(running, prompt(1, 2, 3))
    other = world.serve("b", prompt(1, 2, 3, 4))
    assert other.device_hit_tokens == 12
    assert world.cache.extend(running, 20)
    longer = prompt(1, 2, 3, 999, tail=2)
    world.fill(longer, running.pages, 3)
    world.cache.cache_finished_req(running, longer)
    assert world.serve("c", longer).device_hit_tokens == 16


def test_two_requests_that_compute_the_same_prefix_keep_one_copy(world: World) -> None:
    key = prompt(1, 2, 3)
    first, second = world.begin("a", key), world.begin("b", key)
    world.cache.cache_unfinished_req(first, key)
    world.cache.cache_unfinished_req(second, key)
    assert first.pages[:3].tolist() == second.pages[:3].tolist()
    world.compare(key, second.pages[:3])
    world.cache.check()
    world.cache.cache_finished_req(first, key)
    world.cache.cache_finished_req(second, key)
    assert world.device.allocator.used_pages == 3


def test_a_request_without_room_waits_and_changes_nothing(world: World) -> None:
    running = world.begin("a", prompt(*range(14)))
    nodes = world.cache.tree.node_count
    assert world.cache.begin_request("b", prompt(20, 21, 22)) is None
    assert world.cache.tree.node_count == nodes
    world.cache.check()
    world.cache.cache_finished_req(running, prompt(*range(14)))
    world.settle()  # pages that are being copied to L2 cannot be evicted
    assert world.begin("b", prompt(20, 21, 22)) is not None
    world.cache.check()


def test_short_hits_are_not_loaded_back() -> None:
    world = World(config=HiCacheConfig(load_back_threshold_tokens=10))
    world.serve("a", prompt(1, 2))
    world.leave_l1()
    assert world.serve("b", prompt(1, 2)).cached_tokens == 0
    assert world.cache.statistics().skipped["load_too_short"] == 1


def test_short_prompts_are_not_looked_up_in_storage() -> None:
    world = World(backend=memory_backend(), config=HiCacheConfig(prefetch=PrefetchConfig(threshold_tokens=12)))
    assert not world.cache.prefetch_from_storage("a", prompt(1, 2))
    assert world.cache.statistics().skipped["prefetch_too_short"] == 1


def test_pages_that_a_full_write_queue_rejects_are_backed_up_at_their_next_use() -> None:
    world = World(transfer=tuned(TransferConfig, write_pages_max=2))
    world.serve("a", prompt(1, 2, 3))
    assert world.controller.statistics().refused == {"write": 1}
    world.settle()
    assert world.cache.tree.host_pages == 2, "a long prompt is backed up in parts"
    world.serve("b", prompt(1, 2, 3))
    world.settle()
    assert world.cache.tree.host_pages == 3


def test_a_key_that_differs_from_the_shared_pages_is_rejected(world: World) -> None:
    request = world.begin("a", prompt(1, 2, 3).head(9))
    assert world.cache.extend(request, 16)
    world.cache.cache_unfinished_req(request, prompt(1, 2, 3))
    with pytest.raises(InvalidInput):
        world.cache.cache_unfinished_req(request, prompt(1, 2, 9))
    world.cache.check()
    # Tokens of an incomplete page may still change.
    world.cache.cache_unfinished_req(request, prompt(1, 2, 3).head(12).extended([77]))
    world.cache.cache_finished_req(request, prompt(1, 2, 3))
    assert world.cache.match_prefix(prompt(1, 2, 3)).pages == 3


def test_an_engine_may_insert_pages_that_it_has_allocated_itself(world: World) -> None:
    pages = world.cache.page_source.alloc(2)
    assert pages is not None
    key = prompt(1, 2, tail=0)
    world.fill(key, pages, 0)
    assert world.cache.insert(key, pages).present_pages == 0
    again = world.cache.page_source.alloc(2)
    assert again is not None
    assert world.cache.insert(key, again).present_pages == 2
    world.cache.page_source.free(again)
    world.cache.check()
    assert world.serve("a", prompt(1, 2)).device_hit_tokens == 8


class _UnstartableCopies(CpuCopyEngine):
    """A copy engine that has no memory for loads or for backups, as `broken` says."""

    broken = ""

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        if self.broken == "load":
            raise RuntimeError("out of memory")
        return super().load(host_blocks, blocks, after=after)

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        if self.broken == "backup":
            raise RuntimeError("out of memory")
        return super().backup(blocks, host_blocks, after=after)


@pytest.mark.parametrize("direction", ["load", "backup"])
def test_after_a_copy_that_cannot_start_the_cache_raises_transfer_errors(direction: str) -> None:
    backend = memory_backend()
    world = World(copies=_UnstartableCopies, backend=backend)
    world.serve("a", prompt(1, 2, 3))
    world.leave_l1()
    copies = world.controller._copies
    assert isinstance(copies, _UnstartableCopies)
    copies.broken = direction
    request = world.admit("b", prompt(1, 2, 3, 4))
    transfer = world.cache.start_loading()
    assert transfer is not None
    if direction == "load":
        with pytest.raises(TransferError):
            transfer.wait_layer(0)
        world.cache.cache_finished_req(request, None)
    else:
        transfer.wait_layer(1)
        world.cache.cache_finished_req(request, prompt(1, 2, 3, 4))
    world.settle()
    with pytest.raises(TransferError):
        world.cache.begin_request("c", prompt(1, 2, 3))
    assert not world.cache.prefetch_from_storage("d", prompt(1, 2, 3, 4, 5, 6, 7))
    assert backend.usage().pages == 3, "after a fault of the device no pages are stored"


def test_a_reservation_without_enough_room_evicts_nothing() -> None:
    world = World(device_pages=16, host_pages=8)
    world.serve("a", prompt(1, 2))
    world.leave_l1()
    world.serve("b", prompt(11, 12, 13, 14, 15))
    world.settle()
    assert world.cache.tree.host_pages == 7
    used = world.cache.match_prefix(prompt(11, 12, 13, 14, 15)).node
    world.cache.tree.hold_host(used)
    world.serve("c", prompt(21, 22, 23, 24))
    world.settle()
    assert world.cache.statistics().skipped["backup_no_host_room"] == 1
    assert world.serve("d", prompt(1, 2)).host_hit_tokens == 8
    world.cache.tree.release_host(used)


def test_a_closed_cache_rejects_requests_and_closing_drops_loads_that_were_not_started() -> None:
    world = World()
    world.serve("a", prompt(1, 2, 3))
    world.leave_l1()
    request = world.admit("b", prompt(1, 2, 3))
    world.cache.cache_finished_req(request, None)
    assert world.cache.close(), "a queued load that was not started must not delay closing"
    world.cache.check()
    with pytest.raises(InvalidInput, match="closed"):
        world.cache.begin_request("c", prompt(1, 2, 3))
    assert not world.cache.prefetch_from_storage("d", prompt(1, 2, 3))


class _HeldCopies(CpuCopyEngine):
    """A copy engine whose loads wait while `gate` is not set."""

    gate: threading.Event

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        self.gate.wait(30)
        super()._load_layer(layer, host_blocks, blocks)


def test_a_request_that_shares_pages_in_flight_waits_for_their_load_too() -> None:
    _HeldCopies.gate = threading.Event()
    world = World(copies=_HeldCopies)
    world.serve("a", prompt(1, 2, 3))
    world.leave_l1()
    first = world.admit("b", prompt(1, 2, 3))
    load = world.cache.start_loading()
    world.step()
    second = world.admit("c", prompt(1, 2, 3))
    assert load is not None
    assert second.device_hit_tokens == 12
    assert world.cache.start_loading() is load and not load.done()
    _HeldCopies.gate.set()
    load.wait_layer(1)
    world.compare(prompt(1, 2, 3), second.pages[:3])
    world.settle()
    assert world.cache.start_loading() is None
    world.cache.cache_finished_req(first, None)
    world.cache.cache_finished_req(second, None)


def test_a_token_allocator_over_the_cache_evicts_pages_and_all_pages_are_accounted_for() -> None:
    """The engine allocates slots, computes into them, and hands the whole pages to the tree."""
    world = World(device_pages=6)
    world.serve("a", prompt(1, 2, 3))
    world.settle()
    allocator = PagedTokenToKVPoolAllocator(world.cache.page_source, GEOMETRY.page_size)
    assert allocator.available_tokens == 6 * GEOMETRY.page_size
    slots = allocator.alloc_extend(torch.tensor([0]), torch.tensor([18]), torch.tensor([-1]), 18)
    assert slots is not None
    pages = (slots[:: GEOMETRY.page_size] // GEOMETRY.page_size).numpy().astype(np.int32)
    world.cache.check()
    key = prompt(4, 5, 6, 7, tail=0)
    world.fill(key, pages[:4], 0)
    assert world.cache.insert(key, pages[:4]).present_pages == 0
    allocator.free(slots[16:])
    world.cache.check()
    assert world.serve("b", prompt(4, 5, 6, 7)).device_hit_tokens == 16


def test_rejected_drafts_return_their_pages_but_not_the_prefixes_that_were_evicted_for_them() -> None:
    world = World(device_pages=6)
    world.serve("a", prompt(1, 2, 3))
    world.settle()
    allocator = PagedTokenToKVPoolAllocator(world.cache.page_source, GEOMETRY.page_size)
    drafts = allocator.alloc_drafts(torch.tensor([0]), torch.tensor([24]), torch.tensor([-1]), 24)
    assert drafts is not None and world.cache.request_pages == 6
    assert len(world.cache.match_prefix(prompt(1, 2, 3)).device_pages) == 0
    world.cache.check()
    drafts.keep(torch.tensor([5]))
    assert world.cache.request_pages == 2 and allocator.available_tokens == 16
    world.cache.check()
    assert len(world.cache.match_prefix(prompt(1, 2, 3)).device_pages) == 0
    allocator.free(drafts.slots[:5])
    world.cache.check()
    assert world.cache.request_pages == 0 and world.cache.device.allocator.free_pages == 6
