"""Free list of the pages of one pool.

Invariant: every page in `first .. first + capacity - 1` is either on the free stack, once, or marked as used.
Owned by the scheduler thread, so there is no lock.
"""

from __future__ import annotations

import numpy as np

from ..errors import InvalidInput, InvariantError
from ..types import PageIds


class PageAllocator:
    """Hands out pages by id, the ones freed last first (their memory is the warmest).

    `first` is the smallest id: 1 for device pools, whose page 0 is padding, 0 for host pools.
    """

    def __init__(self, capacity: int, *, first: int = 0) -> None:
        self.capacity = capacity
        self.first = first
        # Reversed, so that a fresh pool hands out ascending ids: long runs make copies cheaper.
        self._stack = np.arange(first + capacity - 1, first - 1, -1, dtype=np.int32)
        self._free = capacity
        self._used = np.zeros(first + capacity, dtype=np.bool_)
        self._stamp = np.empty(first + capacity, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._free

    @property
    def used_pages(self) -> int:
        """Pages handed out and not yet returned."""
        return self.capacity - self._free

    def alloc(self, count: int) -> PageIds | None:
        """`count` pages as an int32 array of its own, or None if fewer are free. Atomic: None changes nothing."""
        if count < 0:
            raise InvalidInput(f"allocator: cannot hand out {count} pages")
        if count > self._free:
            return None
        pages = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._used[pages] = True
        return pages

    def free(self, pages: PageIds) -> None:
        """Return pages. Raises InvariantError, and changes nothing, for a page that is free already or named twice."""
        count = len(pages)
        if count == 0:
            return
        if not self._used[pages].all():
            raise InvariantError(f"double free: {pages[~self._used[pages]][:8].tolist()} are free already")
        order = np.arange(count, dtype=np.int32)
        self._stamp[pages] = order
        if (self._stamp[pages] != order).any():
            raise InvariantError("double free: a page is named twice in one call")
        self._used[pages] = False
        self._stack[self._free : self._free + count] = pages[::-1]
        self._free += count

    def check(self) -> None:
        """Raises InvariantError if the free stack and the used marks disagree."""
        free = self._stack[: self._free]
        if len(np.unique(free)) != self._free:
            raise InvariantError("allocator: a page is on the free stack twice")
        if self._used[free].any() or int(self._used.sum()) != self.used_pages:
            raise InvariantError("allocator: free stack and used marks disagree")
