"""Copies between L1 and L2 as the controller starts them: each after the latest fence, all loads in flight as one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache.config import HiCacheConfig
from hicache.controller import HiCacheController
from hicache.controller.operations import FENCES_KEPT
from hicache.errors import TransferError
from hicache.tiers import EngineBlocks, Fence, HostPool, HostWindow, Transfer, create_device_pool
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices, PageIds
from tests.cache.world import GEOMETRY, World, prompt
from tests.steps import StepCounter
from tests.waiting import WAIT_S


def pages(*numbers: int) -> PageIds:
    return np.array(numbers, dtype=np.int32)


class Copies(CpuCopyEngine):
    """Records the fence of each copy. A load of host page 0 fails."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        self.fences: list[Fence | None] = []

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        self.fences.append(after)
        return super().backup(blocks, host_blocks, after=after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        self.fences.append(after)
        return super().load(host_blocks, blocks, after=after)

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        if 0 in host_blocks:
            raise OSError("device lost")
        super()._load_layer(layer, host_blocks, blocks)


class Rig:
    """A controller over two small pools, without storage."""

    def __init__(self) -> None:
        self.device, self.host = create_device_pool(GEOMETRY, 8), HostPool(GEOMETRY, 8)
        self.copies = Copies(self.device.blocks, HostWindow(self.host))
        self.controller = HiCacheController(self.host, self.copies, None)
        self.steps = StepCounter()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for _ in range(10):
        rig.steps.advance()
    assert rig.controller.close(WAIT_S)


def test_a_failed_load_is_not_hidden_by_a_later_successful_load(rig: Rig) -> None:
    failed = rig.controller.submit_load(pages(0), pages(1), 0)
    first = rig.controller.launch_loads()
    fine = rig.controller.submit_load(pages(1), pages(2), 0)
    both = rig.controller.launch_loads()
    assert first is not None and both is not None and both.wait(WAIT_S) and both.done()
    assert rig.controller._launched_loads[1].transfer.error is None, "the later one alone would not tell"
    assert both.error is first.error is not None
    with pytest.raises(TransferError, match="device lost"):
        both.wait_layer(0)
    acks = rig.controller.poll()
    assert acks is not None and acks.failed_loads == [failed, fine] and acks.loaded == []
    assert acks.fault is first.error
    assert rig.controller.launch_loads() is None


def test_a_joined_transfer_ends_with_its_last_load(rig: Rig) -> None:
    rig.controller.submit_load(pages(1), pages(1), 0)
    first = rig.controller.launch_loads()
    assert first is not None and first.wait(WAIT_S)
    rig.controller.record_fence(rig.steps.fence(1))
    rig.controller.submit_load(pages(2), pages(2), 1)
    both = rig.controller.launch_loads()
    assert both is not None
    assert not (both.done() or both.wait(0.0))
    rig.steps.advance()
    both.wait_layer(GEOMETRY.layers - 1)
    assert both.wait(WAIT_S) and both.done() and both.error is None


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_backups_wait_for_the_latest_fence_and_loads_for_that_of_the_last_reader(policy: str) -> None:
    world = World(copies=Copies, config=HiCacheConfig(write_policy=policy, load_back_threshold_tokens=4))
    copies, steps = world.controller._copies, StepCounter()
    assert isinstance(copies, Copies)
    world.serve("other", prompt(9))
    world.cache.record_fence(read := steps.fence(0))
    world.serve("a", prompt(1, 2, 3))
    world.cache.record_fence(written := steps.fence(0))
    world.cache.evict(100)
    world.settle()
    world.cache.evict(100)
    assert copies.fences[-1] is written
    world.cache.record_fence(steps.fence(10))  # of a forward that is still queued, and reads none of these pages
    world.serve("b", prompt(1, 2, 3))
    assert copies.fences[-1] is read
    world.close()


def test_a_load_ends_while_a_large_backup_waits_for_its_fence() -> None:
    """Copies have no priority: each direction has its own thread, so a load does not wait behind a backup."""
    world, steps = World(), StepCounter()
    world.cache.record_fence(steps.fence(0))
    world.serve("a", prompt(1, 2))
    world.leave_l1()
    world.cache.record_fence(steps.fence(1))  # of the forward that computes the next prompt
    world.serve("b", prompt(*range(10, 20), tail=0))  # without a tail, whose freed page the load would get
    world.step()
    loaded = world.attempt("c", prompt(1, 2))  # waits for the load, and compares
    assert loaded.host_hit_tokens == 2 * GEOMETRY.page_size
    assert world.cache._l1.copies_in_flight[0] == 1
    steps.advance()
    world.leave_l1()
    assert world.attempt("d", prompt(*range(10, 20))).host_hit_tokens == 10 * GEOMETRY.page_size
    world.close()


def test_a_load_after_a_dropped_fence_waits_for_the_oldest_kept_fence(rig: Rig) -> None:
    recorded = [rig.steps.fence(0) for _ in range(FENCES_KEPT + 3)]
    for fence in recorded:
        rig.controller.record_fence(fence)
    for page, after in enumerate((0, 1, 3, 4, len(recorded)), start=1):
        rig.controller.submit_load(pages(page), pages(page), after)
        rig.controller.launch_loads()
    assert rig.copies.fences == [recorded[3], recorded[3], recorded[3], recorded[3], recorded[-1]]
