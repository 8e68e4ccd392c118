"""The free list of pages: its order, free groups, double frees."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.tiers import PageAllocator
from hicache.types import Indices, PageIds
from tests.seeds import rng, seeds


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def take(allocator: PageAllocator, count: int) -> list[int]:
    pages = allocator.alloc(count)
    assert pages is not None and pages.dtype == np.int32
    return [int(page) for page in pages]


def test_a_stack_allocates_the_pages_freed_last() -> None:
    allocator = PageAllocator(8)
    take(allocator, 6)
    allocator.free(ids(4, 2))
    assert take(allocator, 3) == [4, 2, 6]


def test_a_freed_array_belongs_to_the_caller_again() -> None:
    allocator = PageAllocator(4)
    pages = ids(*take(allocator, 3))
    with allocator.free_group():
        allocator.free(pages[:1])
        pages[0] = 99
    allocator.free(pages[1:])
    pages[:] = 99
    assert sorted(take(allocator, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [[0, 0], [1], [3], [0, 2, 0], [4], [0, -1], [-2], [0, 2] * 3])
def test_double_frees_and_foreign_pages_are_rejected_and_change_nothing(wrong: list[int]) -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3)
    assert pages is not None
    allocator.free(pages[1:2])
    with pytest.raises(InvariantError):
        allocator.free(ids(*wrong))
    assert allocator.used_pages == 2
    allocator.check()


class Trusting(PageAllocator):
    """Does not check for double frees."""

    def _mark_free(self, pages: PageIds) -> Indices:
        self._marks[pages] = 0
        return pages.astype(np.intp)


def test_without_the_check_a_double_free_gives_a_page_two_owners() -> None:
    allocator = Trusting(4)
    take(allocator, 4)
    allocator.free(ids(1))
    allocator.free(ids(1))
    with pytest.raises(InvariantError):
        allocator.check()
    assert take(allocator, 2) == [1, 1]


def test_a_group_that_raises_still_frees_its_pages() -> None:
    allocator = PageAllocator(4)
    pages = ids(*take(allocator, 4))
    with pytest.raises(KeyError), allocator.free_group():
        allocator.free(pages[:2])
        raise KeyError
    assert allocator.free_pages == 2
    allocator.check()
    with allocator.free_group():
        allocator.free(pages[2:])
    assert allocator.free_pages == 4


def test_groups_do_not_nest() -> None:
    allocator = PageAllocator(4)
    pages = ids(*take(allocator, 4))
    with allocator.free_group():
        allocator.free(pages[:1])
        with pytest.raises(InvalidInput, match="nest"), allocator.free_group():
            raise AssertionError("not reached")
        allocator.free(pages[1:])
        assert allocator.free_pages == 0
    assert allocator.free_pages == 4


class Sets:
    """The free, used and collected pages as sets."""

    def __init__(self, capacity: int, first: int) -> None:
        self.free = set(range(first, first + capacity))
        self.used: set[int] = set()
        self.collected: set[int] = set()

    def take(self, pages: list[int]) -> None:
        assert set(pages) <= self.free and len(set(pages)) == len(pages)
        self.free -= set(pages)
        self.used |= set(pages)


@pytest.mark.parametrize("seed", seeds(20))
def test_random_use_agrees_with_sets(seed: int) -> None:
    numbers = rng(seed)
    capacity, first = numbers.randint(1, 40), numbers.randint(0, 1)
    allocator, model = PageAllocator(capacity, first=first), Sets(capacity, first)
    for _ in range(30):
        if numbers.random() < 0.3:
            with allocator.free_group():
                for _ in range(numbers.randint(0, 6)):
                    step(allocator, model, numbers, model.collected)
            model.free |= model.collected
            model.collected.clear()
        else:
            step(allocator, model, numbers, model.free)
        assert (allocator.free_pages, allocator.used_pages) == (len(model.free), len(model.used))
        allocator.check()


def step(allocator: PageAllocator, model: Sets, numbers: random.Random, freed: set[int]) -> None:
    """Do one allocation, one free, or one double free; freed pages are added to `freed`."""
    kind = numbers.randrange(5)
    if kind < 2:
        count = numbers.randint(0, allocator.capacity)
        pages = allocator.alloc(count)
        assert (pages is None) == (count > len(model.free))
        if pages is not None:
            model.take(pages.tolist())
    elif kind < 4:
        chosen = numbers.sample(sorted(model.used), numbers.randint(0, len(model.used)))
        allocator.free(ids(*chosen))
        model.used -= set(chosen)
        freed |= set(chosen)
    elif model.free | model.collected:
        wrong = [*numbers.sample(sorted(model.used), numbers.randint(0, len(model.used))),
                 numbers.choice(sorted(model.free | model.collected))]
        numbers.shuffle(wrong)
        with pytest.raises(InvariantError):
            allocator.free(ids(*wrong))
    allocator.check()


@pytest.mark.parametrize("damage", ["stack", "marks"])
def test_a_damaged_free_list_does_not_pass_the_check(damage: str) -> None:
    allocator = PageAllocator(6)
    take(allocator, 3)
    allocator.free(ids(1))
    allocator.check()
    if damage == "stack":
        allocator._stack[-1] = allocator._stack[-2]
    else:
        allocator._marks[5] = -1
    with pytest.raises(InvariantError):
        allocator.check()
