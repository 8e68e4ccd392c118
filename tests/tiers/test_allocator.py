"""The free list of pages: stack and ascending order, free groups, double frees."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.tiers import PageAllocator
from hicache.types import Indices, PageIds
from tests.seeds import rng, seeds

ORDERS = pytest.mark.parametrize("ascending", [False, True], ids=["stack", "ascending"])


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


@ORDERS
def test_a_freed_array_belongs_to_the_caller_again(ascending: bool) -> None:
    allocator = PageAllocator(4, ascending=ascending)
    pages = ids(*take(allocator, 3))
    with allocator.free_group():
        allocator.free(pages[:1])
        pages[0] = 99
    allocator.free(pages[1:])
    pages[:] = 99
    assert sorted(take(allocator, 4)) == [0, 1, 2, 3]


@ORDERS
@pytest.mark.parametrize("wrong", [[0, 0], [1], [3], [0, 2, 0], [4], [0, -1], [-2], [0, 2] * 3])
def test_double_frees_and_foreign_pages_are_rejected_and_change_nothing(wrong: list[int], ascending: bool) -> None:
    allocator = PageAllocator(4, ascending=ascending)
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


@ORDERS
def test_without_the_check_a_double_free_gives_a_page_two_owners(ascending: bool) -> None:
    allocator = Trusting(4, ascending=ascending)
    take(allocator, 4)
    allocator.free(ids(1))
    allocator.free(ids(1))
    with pytest.raises(InvariantError):
        allocator.check()
    assert take(allocator, 2) == [1, 1]


@ORDERS
def test_a_group_that_raises_still_frees_its_pages(ascending: bool) -> None:
    allocator = PageAllocator(4, ascending=ascending)
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
    """The free, used and collected pages as sets; in ascending order also the sorted part of the free pages."""

    def __init__(self, capacity: int, first: int, ascending: bool) -> None:
        self.free = set(range(first, first + capacity))
        self.sorted_part = set(self.free)
        self.used: set[int] = set()
        self.collected: set[int] = set()
        self.ascending = ascending

    def take(self, pages: list[int]) -> None:
        if self.ascending:
            if len(pages) > len(self.sorted_part):
                self.sorted_part = set(self.free)
            assert pages == sorted(self.sorted_part)[: len(pages)]
            self.sorted_part -= set(pages)
        assert set(pages) <= self.free and len(set(pages)) == len(pages)
        self.free -= set(pages)
        self.used |= set(pages)


@ORDERS
@pytest.mark.parametrize("seed", seeds(20))
def test_random_use_agrees_with_sets(seed: int, ascending: bool) -> None:
    numbers = rng(seed)
    capacity, first = numbers.randint(1, 40), numbers.randint(0, 1)
    allocator, model = PageAllocator(capacity, first=first, ascending=ascending), Sets(capacity, first, ascending)
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
                 numbers.choice(sorted(model.free | model.collected))]  # fmt: skip
        numbers.shuffle(wrong)
        with pytest.raises(InvariantError):
            allocator.free(ids(*wrong))
    allocator.check()


@pytest.mark.parametrize("damage", ["stack", "marks", "count", "order"])
def test_a_damaged_free_list_does_not_pass_the_check(damage: str) -> None:
    allocator = PageAllocator(6, ascending=True)
    take(allocator, 3)
    allocator.free(ids(1))
    allocator.check()
    if damage == "stack":
        allocator._stack[-1] = allocator._stack[-2]
    elif damage == "marks":
        allocator._marks[5] = -1
    elif damage == "count":
        allocator._released_pages += 1
    else:
        allocator._stack[-3:] = allocator._stack[-3:][::-1].copy()
    with pytest.raises(InvariantError):
        allocator.check()
