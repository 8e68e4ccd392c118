"""The free list."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import InvariantError
from hicache.tiers import PageAllocator


def test_page_zero_of_a_device_pool_is_never_handed_out() -> None:
    pages = PageAllocator(8, first=1).alloc(8)
    assert pages is not None
    assert pages.tolist() == list(range(1, 9))
    assert pages.dtype == np.int32


def test_too_much_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.alloc(5) is None
    assert allocator.free_pages == 4
    allocator.check()


def test_freed_pages_are_handed_out_again() -> None:
    allocator = PageAllocator(4)
    first = allocator.alloc(3)
    assert first is not None
    allocator.free(first)
    again = allocator.alloc(4)
    assert again is not None and sorted(again.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("twice", [[0, 0], [1], [3]])
def test_a_double_free_is_found_and_changes_nothing(twice: list[int]) -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3)
    assert pages is not None
    allocator.free(pages[1:2])
    with pytest.raises(InvariantError):
        allocator.free(np.array(twice, dtype=np.int32))
    assert allocator.used_pages == 2
    allocator.check()
