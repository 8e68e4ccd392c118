"""The tree against a brute-force oracle: random operations, compared and checked after each step."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.keys import RadixKey
from hicache.radix import Inserted, Node, RadixTree
from hicache.types import PageIds
from tests.radix.machine import Machine
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

PAGE_SIZES = (1, 16, 64)
# 3 page sizes x 12 seeds x 1,600 steps are 57,600 operations, each with its checks.
SEEDS = 12
STEPS = 1600


def step(machine: Machine) -> None:
    """Run one operation and all checks. Operations that begin a use or copy are about as frequent as those that end it.
    """
    machine.random.choice(
        [
            machine.match, machine.peek, machine.hash_pages, machine.use, machine.insert, machine.insert,
            machine.insert, machine.load_back, machine.backup, machine.finish_copy, machine.finish_copy,
            machine.prefetch, machine.finish_prefetch, machine.acknowledge_store, machine.lose_page, machine.lock,
            machine.unlock, machine.unlock, machine.hold, machine.release, machine.release, machine.pin, machine.unpin,
            machine.unpin, machine.evict_device, machine.evict_device, machine.evict_host,
        ]
    )()
    machine.check()


@pytest.mark.parametrize("seed", seeds(SEEDS))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_operations_agree_with_the_oracle(page_size: int, seed: int) -> None:
    machine = Machine(page_size, rng(seed))
    for _ in range(STEPS):
        step(machine)
    machine.empty()


def test_pages_that_a_request_computes_in_parts_sometimes_become_one_node() -> None:
    machine = Machine(16, rng(1))
    for _ in range(STEPS):
        step(machine)
    assert machine.grown


class _ForgetsPriority(RadixTree):
    """Splits without giving the head the priority of its run."""

    def split(self, tail: Node, pages: int) -> Node:
        head = super().split(tail, pages)
        head.priority = 0
        return head


class _MixesPages(RadixTree):
    """Splits and gives the head its own pages of L1 in another order."""

    def split(self, tail: Node, pages: int) -> Node:
        head = super().split(tail, pages)
        if head.device is not None:
            head.device = head.device[::-1].copy()
        return head


class _PeekMarks(RadixTree):
    """Changes a node in a peek."""

    def peek(self, key: RadixKey):  # type: ignore[no-untyped-def]
        self.match(key)
        return super().peek(key)


class _DropsPins(RadixTree):
    """Evicts pinned nodes."""

    def pin(self, node: Node) -> None:
        pass

    def unpin(self, node: Node) -> None:
        pass


class _GrowsUnderOthers(RadixTree):
    """Appends pages of one request to a run that another request has locked to its end."""

    def insert(self, key: RadixKey, device_pages: PageIds, *, below: Node | None = None, **options: Any) -> Inserted:
        others = [below] * (below.lock_ref - 1) if below is not None else []
        for node in others:
            self.unlock(node)
        inserted = super().insert(key, device_pages, below=below, **options)
        for node in others:
            self.lock(node)
        return inserted


@pytest.mark.parametrize("kind", [_ForgetsPriority, _MixesPages, _PeekMarks, _DropsPins, _GrowsUnderOthers])
def test_the_oracle_detects_a_tree_that(kind: type[RadixTree]) -> None:
    """Negative control: one small change of the tree shows within a few seeds."""
    for seed in range(5):
        machine = Machine(1, rng(seed))
        machine.tree.__class__ = kind
        try:
            for _ in range(STEPS):
                step(machine)
        except AssertionError:
            return
    pytest.fail("not noticed")
