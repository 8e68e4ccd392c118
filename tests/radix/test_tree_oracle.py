"""The tree against a brute-force oracle: random operations, compared and checked after each step."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.keys import RadixKey, token_bytes
from hicache.radix import Node, RadixTree
from tests.radix.machine import Machine
from tests.seeds import rng, seeds

PAGE_SIZES = (1, 16, 64)
# 3 page sizes x 42 seeds x 1,600 steps are 201,600 operations, each with its checks.
SEEDS = 42
STEPS = 1600


def step(machine: Machine) -> None:
    """One operation and all checks. What begins something is about as frequent as what ends it."""
    machine.random.choice(
        [
            machine.match, machine.peek, machine.hash_pages, machine.use, machine.insert, machine.insert,
            machine.insert, machine.load_back, machine.backup, machine.finish_copy, machine.finish_copy,
            machine.prefetch, machine.finish_prefetch, machine.acknowledge_store, machine.lock, machine.unlock,
            machine.unlock, machine.hold, machine.release, machine.release, machine.pin, machine.unpin,
            machine.unpin, machine.evict_device, machine.evict_device, machine.evict_host,
        ]
    )()  # fmt: skip
    machine.check()


@pytest.mark.parametrize("seed", seeds(SEEDS))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_operations_agree_with_the_oracle(page_size: int, seed: int) -> None:
    machine = Machine(page_size, rng(seed))
    for _ in range(STEPS):
        step(machine)
    machine.empty()


class _ForgetsPriority(RadixTree):
    """Splits without telling the head how much its run matters."""

    def split(self, tail: Node, pages: int) -> Node:
        head = super().split(tail, pages)
        head.priority = 0
        return head


class _PeekMarks(RadixTree):
    """Looks and leaves a trace."""

    def peek(self, key: RadixKey):  # type: ignore[no-untyped-def]
        self.match(key)
        return super().peek(key)


class _DropsPins(RadixTree):
    """Evicts what is pinned."""

    def pin(self, node: Node) -> None:
        pass

    def unpin(self, node: Node) -> None:
        pass


@pytest.mark.parametrize("kind", [_ForgetsPriority, _PeekMarks, _DropsPins])
def test_the_oracle_notices_a_tree_that(kind: type[RadixTree]) -> None:
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


def test_the_oracle_notices_a_tree_that_forgets_a_split() -> None:
    """Negative control: a tree whose split hands the tail's pages to nobody fails the comparison."""
    machine = Machine(1, rng(0), position_bytes=4)
    key = RadixKey(token_bytes([1, 2, 3]))
    ids = np.array([1, 2, 3], dtype=np.int32)
    machine.tree.insert(key, ids)
    machine.oracle.insert(key.seed, machine.pages_of(key), ids.tolist(), 0, 0)
    node = machine.tree.match(key).node
    assert node.device is not None
    node.device = node.device[:2]
    with pytest.raises(AssertionError):
        machine.check()
