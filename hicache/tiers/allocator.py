"""Free list of the pages of one pool, and the interface of one that an engine owns.

Invariant: every page in `first .. first + capacity - 1` is in exactly one state: on the free stack; collected by an
open free group; or used. Only used pages are marked `_USED`. Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import numpy as np

from ..arguments import instance, whole
from ..errors import InvalidInput, InvariantError
from ..types import Indices, PageIds

# Free pages are marked with array positions, which are never negative.
_USED = np.int32(-1)
_PAGE_ID = np.dtype(np.int32)


@runtime_checkable
class PageSource(Protocol):
    """The source of pages: a `PageAllocator`, or a cache (`HiRadixCache.page_source`), which evicts to make room."""

    @property
    def first(self) -> int:
        """The smallest page id."""

    @property
    def capacity(self) -> int:
        """The number of pages in the pool."""

    @property
    def free_pages(self) -> int:
        """The number of pages that can be allocated now."""

    def alloc(self, count: int) -> PageIds | None:
        """Return `count` pages, or None if there is no room. Evictions are not undone then."""

    def free(self, pages: PageIds) -> None:
        """Free pages. Raises InvariantError if a page is not in use."""

    def free_group(self) -> AbstractContextManager[None]:
        """Collect all frees inside the block and apply them at its end."""


class PagePool(PageSource, Protocol):
    """The pages of one pool: a `PageAllocator`, or an engine's own free list (`EnginePages`)."""

    @property
    def used_pages(self) -> int:
        """The number of pages that the owner of this object holds."""

    @property
    def group_open(self) -> bool:
        """True if a free group is open: pages freed now become free only when it ends."""

    def check(self) -> None:
        """Raise InvariantError if the free list is inconsistent."""


@runtime_checkable
class EnginePages(PagePool, Protocol):
    """The free list of an engine that owns the slots of L1: its requests allocate pages without the cache.

    `used_pages` are those that the cache holds: it has allocated them, or taken them over from a request.
    """

    def take_over(self, count: int) -> None:
        """Note that the cache holds `count` more pages, which a request of the engine has allocated."""


class PageAllocator:
    """Allocates pages by id. `first` is the smallest id: 1 for device pools, whose page 0 is padding, 0 for host pools.

    The pages freed last are allocated first: their memory is the warmest, and the cost of a free does not depend on the
    number of free pages.

    Double frees are always detected, not only in debug mode, because two owners of one page would corrupt data. The
    check costs about 1 us per call and 2 ns per page.
    """

    def __init__(self, capacity: int, *, first: int = 0) -> None:
        self.capacity = capacity = whole("capacity", capacity)
        self.first = first = whole("first", first)
        # Free from `_top` on. A new pool allocates ascending ids, because long runs make copies cheaper.
        self._stack = np.arange(first, first + capacity, dtype=np.intp)
        self._top = 0
        self._group: list[Indices] | None = None
        # Indexed by page: `_USED`, or another value if the page is free.
        self._marks = np.zeros(first + capacity, dtype=np.int32)
        # Called with the pages of each `free`.
        self.freed: list[Callable[[PageIds], None]] = []
        # 0, 1, 2 ...: created once, because numpy lets other threads run while it creates such an array.
        self._places = np.arange(capacity, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        """The number of pages that can be allocated now."""
        return self.capacity - self._top

    @property
    def group_open(self) -> bool:
        """True if a free group is open: pages freed now become free only when it ends."""
        return self._group is not None

    @property
    def used_pages(self) -> int:
        """The number of allocated pages. Pages collected by an open free group are neither used nor free."""
        return self._top - sum(map(len, self._group or ()))

    def alloc(self, count: int) -> PageIds | None:
        """Return `count` pages as a new int32 array, or None if fewer are free. Atomic: None changes nothing."""
        index = self.alloc_indices(count)
        return None if index is None else index.astype(_PAGE_ID)

    def alloc_indices(self, count: int) -> Indices | None:
        """Allocate as `alloc`, but return the pages in an array type for indexing."""
        count = whole("count", count)
        if count > self.free_pages:
            return None
        index = self._stack[self._top : self._top + count].copy()
        self._top += count
        self._marks[index] = _USED
        return index

    def free(self, pages: PageIds) -> None:
        """Free pages. Raises InvariantError, and changes nothing, if a page is not in use or is passed twice;
        InvalidInput as `require_pages`.
        """
        if len(require_pages(pages)) == 0:
            return
        index = self._mark_free(pages)
        if self._group is not None:
            self._group.append(index)
        else:
            self._push(index)
        for freed in self.freed:
            freed(pages)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Collect all frees inside the block and apply them at its end, also if the block raises.

        So the code inside may still read pages that it has freed: they are not allocated before the end. Raises
        InvalidInput inside another group, because the pages would become free only at the end of the outer group.
        """
        if self._group is not None:
            raise InvalidInput("allocator: a free group is open already; groups do not nest")
        self._group = []
        try:
            yield
        finally:
            collected, self._group = self._group, None
            for index in collected:
                self._push(index)

    def check(self) -> None:
        """Raise InvariantError if the free stack, the collected pages and the used marks disagree."""
        free = np.concatenate((self._stack[self._top :], *(self._group or [])))
        if len(np.unique(free)) != len(free):
            raise InvariantError("allocator: a page is free twice")
        if (self._marks[free] == _USED).any() or np.count_nonzero(self._marks == _USED) != self.used_pages:
            raise InvariantError("allocator: free pages and used marks disagree")

    def _mark_free(self, pages: PageIds) -> Indices:
        """Mark pages as free and return them in a new array. Raises InvariantError, and changes nothing, if a page is
        not in use or is passed twice.
        """
        # The view is unsigned, so that a negative id is out of bounds and does not count from the end. Marks are
        # compared as bytes, which costs a fraction of comparing arrays.
        index = pages.view(np.uint32).astype(np.intp)
        try:
            marks = self._marks[index]
        except IndexError as error:
            raise InvariantError(f"free: {pages[:8].tolist()} are not all pages of this pool") from error
        if marks.tobytes() != _USED.tobytes() * len(pages):
            raise InvariantError(f"double free: {pages[marks != _USED][:8].tolist()} are free already")
        # Each mark becomes the last position of its page in the call; an earlier position of the same page differs.
        places = self._places[: len(index)]
        if len(places) == len(index):  # else more pages were passed than exist
            self._marks[index] = places
        if self._marks[index].tobytes() != places.tobytes():
            self._marks[index] = _USED
            raise InvariantError("double free: a page is named twice in one call")
        return index

    def _push(self, index: Indices) -> None:
        end, self._top = self._top, self._top - len(index)
        self._stack[self._top : end] = index


def require_pages(pages: PageIds) -> PageIds:
    """Return `pages`. Raises InvalidInput unless they are page ids as an allocator returns them."""
    if instance("pages", pages, np.ndarray).dtype != _PAGE_ID or pages.ndim != 1:
        raise InvalidInput(f"pages: expected int32 of one dimension, got {pages.dtype} of {pages.ndim}")
    return pages
