"""Free list of the pages of one pool.

Invariant: every page in `first .. first + capacity - 1` is exactly one of: on the free stack; released (free, but not
yet sorted into the stack); collected by an open free group; marked as used. Only the last is marked `_USED`.
Owned by the scheduler thread, so there is no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..arguments import instance, whole
from ..errors import InvalidInput, InvariantError
from ..types import Indices, PageIds

# Below all places in an array, which mark pages that are free.
_USED = np.int32(-1)
_PAGE_ID = np.dtype(np.int32)


class PageAllocator:
    """Hands out pages by id. `first` is the smallest id: 1 for device pools, whose page 0 is padding, 0 for host pools.

    Pages freed last go out first: their memory is the warmest, and a free costs the same however many pages are free.
    With `ascending`, one allocation's pages ascend and low ids go out first, which keeps the pages of a request close
    together for attention kernels that profit from it. Freed pages then wait on a release list, which is sorted into
    the stack only when that runs short, so the sorting is paid once per many frees.

    A double free is always found, not only when debugging: a page with two owners ends in wrong bytes for one of them,
    and the search costs some 1 us per call and 2 ns per page, which nobody would notice as missing.
    """

    def __init__(self, capacity: int, *, first: int = 0, ascending: bool = False) -> None:
        self.capacity = capacity = whole("capacity", capacity)
        self.first = first = whole("first", first)
        self._ascending = instance("ascending", ascending, bool)
        # From `_top` on. A fresh pool hands out ascending ids: long runs make copies cheaper.
        self._stack = np.arange(first, first + capacity, dtype=np.intp)
        self._top = 0
        self._released: list[Indices] = []
        self._released_pages = 0
        self._group: list[Indices] | None = None
        # By page: `_USED`, or anything else for one that is free.
        self._marks = np.zeros(first + capacity, dtype=np.int32)
        # 0, 1, 2 ...: made once, because numpy lets other threads run while it makes one.
        self._places = np.arange(capacity, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self.capacity - self._top + self._released_pages

    @property
    def group_open(self) -> bool:
        """Whether frees are being collected: they make no page free now."""
        return self._group is not None

    @property
    def used_pages(self) -> int:
        """Pages handed out and not yet returned. What an open free group has collected is neither used nor free."""
        return self.capacity - self.free_pages - self._collected_pages

    @property
    def _collected_pages(self) -> int:
        return sum(map(len, self._group)) if self._group else 0

    def alloc(self, count: int) -> PageIds | None:
        """`count` pages as an int32 array of its own, or None if fewer are free. Atomic: None changes nothing."""
        index = self.alloc_indices(count)
        return None if index is None else index.astype(_PAGE_ID)

    def alloc_indices(self, count: int) -> Indices | None:
        """As `alloc`, to index with."""
        count = whole("count", count)
        if count > self.capacity - self._top:
            if count > self.free_pages:
                return None
            self._sort_in()
        index = self._stack[self._top : self._top + count].copy()
        self._top += count
        self._marks[index] = _USED
        return index

    def free(self, pages: PageIds) -> None:
        """Return pages. Raises InvariantError, and changes nothing, for a page that is not in use or named twice;
        InvalidInput as `require_pages`.
        """
        if len(require_pages(pages)) == 0:
            return
        index = self._mark_free(pages)
        if self._group is not None:
            self._group.append(index)
        elif self._ascending:
            self._released.append(index)
            self._released_pages += len(index)
        else:
            self._push(index)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """What is freed inside becomes free at the end, all at once, also if the block raises.

        So the code inside may still read what it has freed: nobody is given those pages before the end. Raises
        InvalidInput inside another group: its pages would come back later than the inner block says.
        """
        if self._group is not None:
            raise InvalidInput("allocator: a free group is open already; groups do not nest")
        self._group = []
        try:
            yield
        finally:
            collected, self._group = self._group, None
            if self._ascending:
                self._released += collected
                self._released_pages += sum(map(len, collected))
            else:
                for index in collected:
                    self._push(index)

    def check(self) -> None:
        """Raises InvariantError if the free stack, the lists of freed pages and the used marks disagree."""
        free = np.concatenate((self._stack[self._top :], *self._released, *(self._group or [])))
        if len(free) != self.free_pages + self._collected_pages:
            raise InvariantError("allocator: the release list does not hold as many pages as were counted")
        if len(np.unique(free)) != len(free):
            raise InvariantError("allocator: a page is free twice")
        if (self._marks[free] == _USED).any() or np.count_nonzero(self._marks == _USED) != self.used_pages:
            raise InvariantError("allocator: free pages and used marks disagree")
        if self._ascending and (np.diff(self._stack[self._top :]) < 0).any():
            raise InvariantError("allocator: the free stack is not sorted")

    def _mark_free(self, pages: PageIds) -> Indices:
        """Mark pages as free and return them, in an array of its own. Raises InvariantError, changing nothing, if that
        is not what all of them become.
        """
        # Unsigned, so that a negative id is out of bounds and not a page counted from the end. Marks are compared as
        # bytes, at a fraction of what comparing arrays costs.
        index = pages.view(np.uint32).astype(np.intp)
        try:
            marks = self._marks[index]
        except IndexError as error:
            raise InvariantError(f"free: {pages[:8].tolist()} are not all pages of this pool") from error
        if marks.tobytes() != _USED.tobytes() * len(pages):
            raise InvariantError(f"double free: {pages[marks != _USED][:8].tolist()} are free already")
        # Each page keeps the last place where it is named; a page that is named before that as well shows there.
        places = self._places[: len(index)]
        if len(places) == len(index):  # else there are more names than pages
            self._marks[index] = places
        if self._marks[index].tobytes() != places.tobytes():
            self._marks[index] = _USED
            raise InvariantError("double free: a page is named twice in one call")
        return index

    def _push(self, index: Indices) -> None:
        end, self._top = self._top, self._top - len(index)
        self._stack[self._top : end] = index

    def _sort_in(self) -> None:
        for index in self._released:
            self._push(index)
        self._released.clear()
        self._released_pages = 0
        self._stack[self._top :].sort()


def require_pages(pages: PageIds) -> PageIds:
    """Return `pages`. Raises InvalidInput unless they are page ids as an allocator hands them out."""
    if instance("pages", pages, np.ndarray).dtype != _PAGE_ID or pages.ndim != 1:
        raise InvalidInput(f"pages: expected int32 of one dimension, got {pages.dtype} of {pages.ndim}")
    return pages
