"""The two tiers of SGLang's HiRadixCache: write policies, evictions, tombstones, loads, host-only nodes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hicache.config import HiCacheConfig, TransferConfig
from hicache.radix import Node
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.world import GEOMETRY, World, every_hit, filled, memory_backend, prompt
from tests.tuned import tuned
from tests.waiting import wait_for

PAGE = GEOMETRY.page_size
CHAIN = prompt(1, 2, 3)


def world_of(write_policy: str, **options: Any) -> World:
    return World(config=every_hit(write_policy=write_policy, **options))


def chain(world: World) -> World:
    """Serve three prompts, so that the pages 1, 2 and 3 are three nodes, one below the other."""
    for pages in ((1,), (1, 2), (1, 2, 3)):
        world.serve(f"r{len(pages)}", prompt(*pages))
        world.settle()
    return world


def tiers(world: World) -> list[str]:
    """The tiers of the nodes on the path of CHAIN, root first: D, H or DH."""
    node: Node | None = world.cache.match_prefix(CHAIN).node
    found = []
    while node is not None and node.parent is not None:
        found.append("D" * (node.device is not None) + "H" * (node.host is not None))
        node = node.parent
    return found[::-1]


# Write policies


def test_write_through_copies_a_page_once_it_is_computed() -> None:
    world = world_of("write_through")
    world.serve("a", CHAIN)
    world.settle()
    assert tiers(world) == ["DH"]


def test_write_through_selective_copies_a_page_that_two_requests_have_used() -> None:
    assert HiCacheConfig().selective_hits == 2
    world = world_of("write_through_selective")
    world.serve("a", CHAIN)
    world.settle()
    assert tiers(world) == ["D"]
    world.serve("b", CHAIN)
    world.settle()
    assert tiers(world) == ["DH"]


def test_write_back_copies_a_page_when_l1_evicts_it_and_frees_it_after_the_copy() -> None:
    world = world_of("write_back")
    world.serve("a", CHAIN)
    world.settle()
    assert tiers(world) == ["D"]
    eviction = world.cache.evict(3)
    assert (eviction.freed_pages, eviction.writeback_pages, eviction.short_pages) == (0, 3, 0)
    assert world.cache.writeback_pages == 3 and tiers(world) == ["D"]
    world.settle()
    assert world.cache.writeback_pages == 0 and tiers(world) == ["H"]
    assert world.device.allocator.free_pages == world.device.pages


# Evictions


def test_a_node_without_a_copy_leaves_the_tree_when_l1_evicts_it() -> None:
    world = world_of("write_through_selective")
    world.serve("a", CHAIN)
    assert world.cache.evict(3).freed_pages == 3
    assert world.cache.statistics().nodes == 0


def test_a_node_with_a_copy_stays_in_the_tree_as_a_tombstone() -> None:
    world = chain(world_of("write_through"))
    assert world.cache.evict(3).freed_pages == 3
    assert tiers(world) == ["H", "H", "H"] and world.cache.statistics().nodes == 3


def test_l1_evicts_from_the_deepest_node_up() -> None:
    world = chain(world_of("write_through"))
    for expected in (["DH", "DH", "H"], ["DH", "H", "H"], ["H", "H", "H"]):
        world.cache.evict(1)
        assert tiers(world) == expected


def test_l2_evicts_tombstones_from_the_deepest_up_and_removes_them_from_the_tree() -> None:
    world = chain(world_of("write_through"))
    world.leave_l1()
    for nodes in (2, 1, 0):
        world.host.free(world.cache.tree.evict_host(1))
        assert tiers(world) == ["H"] * nodes and world.cache.statistics().nodes == nodes


def test_a_match_has_the_pages_on_l1_and_the_number_of_those_on_l2_only() -> None:
    world = chain(world_of("write_through"))
    world.cache.evict(2)
    match = world.cache.match_prefix(CHAIN)
    assert (len(match.device_pages), match.host_hit_pages, match.pages) == (1, 2, 3)
    assert match.device_node.device is not None and match.node.device is None
    assert match.node.parent is not None and match.node.parent.parent is match.device_node
    assert world.cache.peek(CHAIN) == (1, 2)


# Which nodes L2 has


def test_a_prompt_is_copied_root_first() -> None:
    world = World(config=every_hit(), transfer=tuned(TransferConfig, write_pages_max=2))
    world.serve("a", CHAIN)
    world.settle()
    assert tiers(world) == ["DH", "D"]  # a copy of two pages has ended; the third page waits for its next use
    assert world.cache.tree.host_pages == 2


def test_done_otherwise_a_node_may_be_on_l2_while_its_parent_is_on_l1_only() -> None:
    """In SGLang a node is backed up only after its parent. Here a prefix is closed over both tiers together."""
    world = chain(world_of("write_back"))
    world.cache.evict(1)
    world.settle()
    assert tiers(world) == ["D", "D", "H"]
    assert world.serve("again", CHAIN).cached_tokens == 3 * PAGE


# Loads


def test_a_hit_on_l2_is_loaded_and_its_nodes_are_on_both_tiers_again() -> None:
    world = chain(world_of("write_through"))
    world.cache.evict(2)
    request = world.begin("a", CHAIN)
    assert (request.device_hit_tokens, request.host_hit_tokens) == (PAGE, 2 * PAGE)
    world.settle()
    assert tiers(world) == ["DH", "DH", "DH"]


def test_a_hit_shorter_than_the_threshold_is_not_loaded() -> None:
    assert HiCacheConfig().load_back_threshold_tokens == 10
    for pages, loaded in (((1, 2), 0), ((1, 2, 3), 12)):
        world = world_of("write_through", load_back_threshold_tokens=10)
        world.serve("a", prompt(*pages))
        world.leave_l1()
        assert world.serve("b", prompt(*pages)).host_hit_tokens == loaded


def test_a_load_evicts_other_prefixes_if_l1_is_full() -> None:
    world = World(device_pages=4, config=every_hit())
    world.serve("a", CHAIN)
    world.leave_l1()
    world.serve("b", prompt(7, 8, 9))
    world.settle()
    assert world.serve("c", CHAIN).host_hit_tokens == 3 * PAGE
    assert world.cache.match_prefix(prompt(7, 8, 9)).host_hit_pages == 3


class GatedLayers(CpuCopyEngine):
    """Copies the layers after the first one to L1 when `go_on` is set."""

    go_on = threading.Event()

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        assert layer == 0 or self.go_on.wait(30)
        super()._load_layer(layer, host_blocks, blocks)


def test_the_forward_reads_a_layer_while_later_layers_are_still_being_loaded() -> None:
    GatedLayers.go_on.clear()
    world = World(config=every_hit(), copies=GatedLayers)
    world.serve("a", CHAIN)
    world.leave_l1()
    for (region,) in world.device.blocks.layers:
        region.zero_()
    request = world.admit("b", CHAIN)
    transfer = world.cache.start_loading()
    assert transfer is not None and world.device.loading is transfer
    transfer.wait_layer(0)
    page = int(request.pages[0])
    expected = world.expected(CHAIN, 0)
    assert expected is not None
    rows = [region.numpy()[page] for (region,) in world.device.blocks.layers]
    assert (rows[0] == expected[0]).all() and not (rows[1] == expected[1]).all()
    GatedLayers.go_on.set()
    transfer.wait_layer(1)
    assert (rows[1] == expected[1]).all()
    world.cache.cache_finished_req(request, CHAIN)


class GatedBackups(CpuCopyEngine):
    """Copies to L2 wait while `go_on` is not set."""

    go_on = threading.Event()
    waits = threading.Event()
    gave_up = False

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        if not self.go_on.is_set():
            self.waits.set()
            if not self.go_on.wait(20):
                GatedBackups.gave_up = True
        super()._backup_layer(layer, blocks, host_blocks)


def test_done_otherwise_copies_have_no_priority_because_a_load_never_waits_for_a_backup() -> None:
    """SGLang merges copies into operations with a priority each."""
    GatedBackups.go_on.set()
    world = World(config=every_hit(), copies=GatedBackups)
    world.serve("a", CHAIN)
    world.leave_l1()
    GatedBackups.go_on.clear()
    world.serve("b", prompt(7, 8))
    wait_for(GatedBackups.waits.is_set, world.step)
    assert world.serve("c", CHAIN).host_hit_tokens == 3 * PAGE  # `serve` waits for the load and compares its pages
    assert not GatedBackups.gave_up and world.cache.match_prefix(prompt(7, 8)).node.backup_pending
    GatedBackups.go_on.set()


def test_done_otherwise_l2_has_one_layout_with_all_layers_of_a_page_side_by_side() -> None:
    """SGLang has layer_first and page_first."""
    world = world_of("write_through")
    world.serve("a", CHAIN)
    world.settle()
    pages = world.cache.match_prefix(CHAIN).node.host
    assert pages is not None
    for number, page in enumerate(pages.tolist()):
        expected = world.expected(CHAIN, number)
        assert expected is not None and bytes(world.host.payload(page)) == expected.tobytes()


def test_a_request_that_is_aborted_before_its_load_starts_copies_nothing() -> None:
    world = chain(world_of("write_through"))
    world.cache.evict(3)
    request = world.admit("a", CHAIN)
    world.cache.cache_finished_req(request, None)
    assert world.cache.start_loading() is None
    assert tiers(world) == ["H", "H", "H"]


# Insert and split with three kinds of values


def test_a_tombstone_that_is_computed_again_gets_its_pages_on_l1_and_no_second_node() -> None:
    world = chain(world_of("write_through", load_back_threshold_tokens=1000))
    world.leave_l1()
    request = world.begin("a", CHAIN)
    assert request.cached_tokens == 0
    computed = request.pages[:3].tolist()
    world.cache.cache_finished_req(request, CHAIN)
    assert tiers(world) == ["DH", "DH", "DH"] and world.cache.statistics().nodes == 3
    assert world.cache.match_prefix(CHAIN).device_pages.tolist() == computed


def test_a_split_divides_the_pages_on_both_tiers_and_the_page_keys() -> None:
    world = World(config=every_hit(), backend=memory_backend())
    world.serve("a", CHAIN)
    world.settle()
    whole = world.cache.match_prefix(CHAIN).node
    assert whole.device is not None and whole.host is not None and whole.page_keys is not None
    device, host, keys = whole.device.tolist(), whole.host.tolist(), whole.page_keys
    head = world.cache.match_prefix(prompt(1, 9)).node
    assert whole.parent is head and head.device is not None and head.host is not None
    assert (head.device.tolist(), head.host.tolist(), head.page_keys) == (device[:1], host[:1], keys[:32])
    assert (whole.device.tolist(), whole.host.tolist(), whole.page_keys) == (device[1:], host[1:], keys[32:])


@pytest.mark.parametrize("on_l1", [0, 1])
def test_pages_from_storage_become_nodes_on_l2_only_below_the_cached_prefix(on_l1: int) -> None:
    world = World(config=every_hit(), backend=filled(memory_backend(), CHAIN))
    if on_l1:
        world.serve("a", prompt(1))
        world.settle()
    world.prefetch("b", CHAIN)
    assert tiers(world) == ["DH"] * on_l1 + ["H"]
    node = world.cache.match_prefix(CHAIN).node
    assert node.page_keys == b"".join(CHAIN.page_keys(PAGE, b"", 0, 3)[on_l1:])
    request = world.begin("b", CHAIN)
    assert (request.device_hit_tokens, request.storage_hit_tokens) == (on_l1 * PAGE, (3 - on_l1) * PAGE)
