"""The pages of a store as its operator sees them: of all namespaces, as sealed bytes, without their codec.

`hicache ls`, `stat`, `verify`, `purge`, `trim` and `copy` use it, the sweeps of `limit` and `retention`, and tests, to
check the stored bytes of a driver. Sealed pages are the same bytes in every store, so they can be copied.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..clock import SYSTEM_CLOCK, Clock
from ..errors import BackendUnavailable
from ..frame import HEADER_BYTES, FrameCodec
from .base import SetOutcome, StoredPage
from .driver import Inspects, RemovesListed
from .errors import StoreError
from .pages import PageWrites

# The time limit of each step but the listing: an operator's command has time, but must not hang with a hanging server.
_STEP_S = 60.0
# Pages removed by one call of a driver.
_REMOVED_AT_ONCE = 1000


class SealedPage(PageWrites):
    """One page to be written that is already sealed: the bytes `data` of `page`."""

    seals = False

    def __init__(
        self, page: StoredPage, data: bytes, parent: bytes | None, deadline: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._data = memoryview(data)
        codec = FrameCodec(page.namespace, max(1, len(data) - HEADER_BYTES), clock=clock)
        super().__init__(codec, [page.key], [self._data], parent, deadline, clock)
        self.used_s = page.used_s

    def sealed(self, position: int) -> list[memoryview]:
        return [self._data]


class StoredPages:
    """All pages of the store of `driver`. See the module's docstring. `name` is the store's name in messages.

    All methods block, and raise BackendUnavailable if the store is not usable. They belong to one thread.
    """

    def __init__(self, driver: Inspects, name: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.driver = driver
        self.clock = clock
        self._name = name
        self._closed = False

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._closed:
            raise BackendUnavailable(f"{self._name} store: is closed; open it again")
        try:
            yield
        except StoreError as error:
            general = f"{self._name} store: {error}; try again when the store works"
            raise BackendUnavailable(error.explanation or general) from error

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """Yield the pages of the namespaces whose digest starts with `namespace`; see `Driver.pages`."""
        with self._translated():
            yield from self.driver.pages(namespace, math.inf)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """Return the first `bytes_max` bytes of a page; see `find`."""
        found = self.find(page, bytes_max)
        return None if found is None else found[0]

    def find(self, page: StoredPage, bytes_max: int) -> tuple[bytes, Any] | None:
        """See `Inspects.read_start`. REQUIRES: `bytes_max` is not 0."""
        with self._translated():
            return self.driver.read_start(page, bytes_max, self.clock() + _STEP_S)

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """Store `data`, whole or not at all, as that page; return False if it already exists or the store is full.

        Does not verify: the caller has checked `data`, which comes from another store. `parent` is the key of the page
        before it, from its header.
        """
        pages = SealedPage(page, data, parent, self.clock() + _STEP_S, self.clock)
        with self._translated():
            self.driver.write(pages)
            (outcome,) = pages.finish()
            if outcome is SetOutcome.ERROR:
                raise StoreError(pages.errors[-1])
        return outcome is SetOutcome.STORED

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """Remove pages; return how many existed. A page with an `identity` stays if another object has replaced it. In
        a store that does not tell which pages existed, all count."""
        removed = 0
        # Sorted, because a listing may mix namespaces, and each call of the driver is about one.
        def namespace_and_kind(page: StoredPage) -> tuple[bytes, bool]:
            return page.namespace, page.identity is not None

        for (namespace, is_known), group in itertools.groupby(
            sorted(pages, key=namespace_and_kind), namespace_and_kind
        ):
            found = list(group)
            for start in range(0, len(found), _REMOVED_AT_ONCE):
                some = found[start : start + _REMOVED_AT_ONCE]
                keys, identities = [page.key for page in some], [page.identity for page in some]
                deadline = self.clock() + _STEP_S
                with self._translated():
                    if not is_known and isinstance(self.driver, RemovesListed):
                        count, kinds = self.driver.remove_listed(namespace, keys, deadline)
                    else:
                        count, kinds = self.driver.remove(namespace, keys, deadline, identities if is_known else None)
                    removed += count
                    if kinds:
                        raise StoreError(kinds[0], f"{len(kinds)} of {len(keys)} pages were not removed")
        return removed

    def close(self) -> None:
        """Close the driver. Idempotent."""
        if not self._closed:
            self._closed = True
            self.driver.close()
