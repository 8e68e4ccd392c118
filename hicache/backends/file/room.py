"""Room: how a store stays below its capacity and above its free-space floor.

What counts is bytes of stored pages plus bytes reserved for pages being written, over all namespaces and processes.
Room is made by removing the least recently used page that no other page hangs on (tails before heads), again and again.
A page's file goes before its row is committed away, so the index never says that less is used than there is.

REQUIRES for all of it: a transaction of the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .index import Index, PageRow
from .pages import error_name, page_name, remove_page
from .reconcile import reap
from .store import Store, now_us

# The index itself and new directories grow while pages are written: by less than this from one look at the free space
# to the next one.
_FLOOR_SLACK_BYTES = 1 << 20
# A page that is removed while somebody reads it frees its blocks later. Look again, but do not empty the store for it.
_ROUNDS_MAX = 2
# One file that cannot be removed must not keep all others from being evicted; a sick disk must not be asked forever.
_FAILURES_MAX = 3


@dataclass(slots=True)
class Room:
    """The limits of one store, in bytes; None and 0 stand for no limit. `evicting` hears of each page before its file
    goes, None if nobody wants to."""

    capacity_bytes: int | None
    free_space_floor_bytes: int
    evicted_pages: int = 0
    evicting: Callable[[PageRow], None] | None = None

    def fit(self, store: Store, index: Index, errors: list[str]) -> int:
        """Evict until both limits hold; bytes by which they still do not, 0 on success.

        Appends the class of each error that kept a page from being removed. Raises OSError if the file system cannot
        say how much is free, sqlite3.Error.
        """
        if self._over(store, index) <= 0:
            return 0
        # What dead processes hold goes before anything that somebody could still read.
        reap(index, store.system, store.root_fd, store.owner)
        for _ in range(_ROUNDS_MAX):
            over = self._over(store, index)
            if over <= 0:
                return 0
            self._evict(store, index, over, errors)
        return max(self._over(store, index), 0)

    def _over(self, store: Store, index: Index) -> int:
        totals = index.totals()
        over = 0
        if self.capacity_bytes is not None:
            over = totals.bytes + totals.reserved - self.capacity_bytes
        if self.free_space_floor_bytes:
            space = store.system.statvfs(store.root_fd)
            # Part of what is reserved may be on the disk already and then counts twice: on the safe side.
            free = space.f_bavail * space.f_frsize - totals.reserved
            over = max(over, self.free_space_floor_bytes + _FLOOR_SLACK_BYTES - free)
        return over

    def _evict(self, store: Store, index: Index, need: int, errors: list[str]) -> None:
        failures = 0
        while need > 0 and failures < _FAILURES_MAX:
            page = index.oldest_leaf()
            if page is None:
                return
            if self.evicting is not None:
                self.evicting(page)
            try:
                remove_page(store.system, store.root_fd, page_name(page.namespace.hex(), page.key))
            except IsADirectoryError:
                pass  # somebody's directory in place of a page: not ours to clear, and no page of ours either
            except OSError as error:
                errors.append(error_name(error))
                failures += 1
                index.postpone(page.row, now_us())
                continue
            index.drop_row(page.row)
            self.evicted_pages += 1
            need -= page.size
