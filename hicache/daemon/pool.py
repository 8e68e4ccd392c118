"""The daemon's host pool: pages of all namespaces in one mapping of fixed size.

    DaemonPool     the memory, and which page is the next victim
    PoolSpace    the pages of one namespace in it

The mapping is cut into units. A page uses as many as it needs, normally in one piece: the units of an evicted page are
reused first, so pages of one size replace each other in warm memory. If namespaces with pages of different sizes
compete, a page may be stored in several pieces, and less than one unit per page is wasted.

Life of a page: `reserve` allocates memory for it, still invisible; its reader fills and verifies it; `publish` makes it
visible; `hold` and `release` surround each copy from it. It leaves by eviction or deletion; its memory is free after
the last holder has released it.

A page that was read from a store enters if there is free room, or if it is requested for the second time; a page that
an engine has handed over always enters. Victims are the least recently used
pages of all namespaces, tails before heads; of its own namespace if that has reached its quota. Pages that are held,
pinned, or were used since the start of the current batch are not evicted.

With adaptive eviction, the pool has one tournament, for as many pages as it holds: all namespaces share its memory, and
the uses of each show which policy is best. But the least recently used page still determines the namespace that loses a
page, so that a namespace does not lose memory to kept pages of another one.

Locking design: one lock per pool guards all fields of the pool and its spaces. It is held for operations on
dictionaries, never while bytes are copied; only the lock of the accounts of missed pages is taken while it is held.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..backends.base import Usage
from ..backends.order import AdaptivePages, EvictionOrder
from ..errors import InvalidInput, InvariantError
from ..frame import HEADER_BYTES, NO_PARENT, PageView
from ..frame.header import PARENT
from ..ghosts import Kind, PageAccounts, Reason
from .hot import Hits, HotPrefixes
from .statistics import HotPrefix, PoolStatistics
from .units import Extent, UnitMemory

# Small enough that a page of 1 MiB wastes under 1 %, large enough that a page in many pieces is copied fast.
UNIT_BYTES = 16 << 10
# Keys that are recorded as requested once: the number of pages of 2 MiB in 128 GiB, in about 8 MiB of memory.
_ASKED_MAX = 1 << 16
# The largest share of pins in the pool.
PINNED_SHARE_MAX = 0.5


@dataclass(slots=True, eq=False)
class PooledPage:
    """One page in the pool. `buffers` are its header and payload in pieces; the first piece contains the header. `loss`
    is why it will be missed after its eviction; None: a store has it."""

    key: bytes
    extents: list[Extent]
    buffers: list[memoryview]
    deletions: int
    holders: int = 0
    is_listed: bool = False
    is_pinned: bool = False
    loss: Kind | None = (Reason.EVICTED, "host")
    hits: Hits = field(default_factory=Hits)

    def view(self) -> PageView:
        """Return the page in the form for a codec."""
        first, *others = self.buffers
        return PageView(first[:HEADER_BYTES], [first[HEADER_BYTES:], *others])


@dataclass(slots=True, eq=False)
class PoolSpace:
    """The pages of one namespace in one pool. Created by `DaemonPool.open`; its methods are the pool's.

    `page_bytes` are header and payload. `deletions` counts the starts and ends of deletions: a page that was read or
    written before one of them does not enter after it. Any thread reads it, for `reserve`, before it reads a page.
    """

    namespace: bytes
    label: str
    page_bytes: int
    units: int
    order: EvictionOrder
    accounts: PageAccounts
    quota_bytes: int | None = None
    openings: int = 1
    used_units: int = 0
    deletions: int = 0
    deleting: int = 0
    pages: dict[bytes, PooledPage] = field(default_factory=dict)


class DaemonPool:
    """Memory for pages of `capacity_bytes`, allocated and touched at once; 0 for an empty pool. Thread-safe.

    `is_adaptive` evicts pages last that a tournament keeps. Each namespace counts missed pages in a part of `accounts`.
    The constructor blocks while the memory is touched, about a quarter of a second per GiB. Raises OSError if the
    allocation fails, InvalidInput for a negative capacity.

    Invariant, verified by `check`: each unit is free or belongs to one page that is listed, held or being filled.
    """

    def __init__(
        self, capacity_bytes: int, accounts: PageAccounts | None = None, *, unit_bytes: int = UNIT_BYTES,
        is_adaptive: bool = False,
    ) -> None:
        if capacity_bytes < 0 or unit_bytes < HEADER_BYTES:
            raise InvalidInput(f"pool: {capacity_bytes} bytes in units of {unit_bytes} is not a valid pool")
        self.capacity_bytes = capacity_bytes // unit_bytes * unit_bytes
        self._lock = threading.Lock()
        self._memory = UnitMemory(capacity_bytes // unit_bytes, unit_bytes)
        self._clock = itertools.count()
        self._is_adaptive = is_adaptive
        self._accounts = accounts or PageAccounts(_ASKED_MAX)
        self._adaptive: AdaptivePages | None = None  # known with the first namespace, whose pages have a size
        self._spaces: dict[bytes, PoolSpace] = {}
        self._unlisted: set[PooledPage] = set()  # being filled, or removed and held
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._hot = HotPrefixes()
        self._pinned_units = 0
        self._admitted = 0
        self._evicted = 0

    # Namespaces

    def open(self, namespace: bytes, payload_bytes: int, label: str = "") -> PoolSpace:
        """Return the space of a namespace, the same one for each opening; each opening must `close` it. `label` is for
        messages.

        Raises InvalidInput if it is open with pages of another size.
        """
        page_bytes = HEADER_BYTES + payload_bytes
        with self._lock:
            space = self._spaces.get(namespace)
            if space is None:
                units = -(-page_bytes // self._memory.unit_bytes)
                if self._is_adaptive and self._adaptive is None:
                    self._adaptive = AdaptivePages(self._memory.units // units)
                adaptive = self._adaptive and self._adaptive.of(namespace)
                order, accounts = EvictionOrder(self._clock, adaptive), self._accounts.part(namespace)
                space = PoolSpace(namespace, label, page_bytes, units, order, accounts)
                self._spaces[namespace] = space
            elif space.page_bytes != page_bytes:
                raise InvalidInput(
                    f"pool: the namespace {namespace.hex()[:8]} is open with pages of {space.page_bytes} bytes, "
                    f"not {page_bytes}"
                )
            else:
                space.openings += 1
            return space

    def close(self, space: PoolSpace) -> None:
        """End one opening of a space; the last one removes its pages. REQUIRES: that opening does not hold pages."""
        with self._lock:
            space.openings -= 1
            if not space.openings:
                for page in list(space.pages.values()):
                    self._drop(space, page)
                space.deletions += 1
                del self._spaces[space.namespace]

    def set_quota(self, space: PoolSpace, quota_bytes: int | None) -> None:
        """Limit the bytes of a namespace; None removes the limit. Evicts pages beyond it, except for held or pinned
        ones: these count, and are evicted later."""
        with self._lock:
            space.quota_bytes = quota_bytes
            self._evict_own(space, 0, next(self._clock))

    # Pages that enter

    def now(self) -> int:
        """Return the start of a batch, for `reserve`."""
        with self._lock:
            return next(self._clock)

    def reserve(
        self, space: PoolSpace, key: bytes, *, since: int, deletions: int, is_wanted: bool = False
    ) -> PooledPage | None:
        """Allocate memory for a page, for `publish` or `abandon`. Return None if it does not enter: it is already in
        the pool, was deleted since `deletions`, does not fit, or needs an eviction and is requested for the first time.
        `is_wanted` pages are admitted as if requested again. `since` is the start of the batch.
        """
        with self._lock:
            if key in space.pages or not self._may_enter(space, deletions):
                return None
            has_room = self._memory.free >= space.units and self._left(space) >= space.units
            may_evict = has_room or is_wanted or self._is_asked_again(space, key)
            if not has_room and not (may_evict and self._make_room(space, since)):
                return None
            extents = self._memory.take(space.units)
            space.used_units += space.units
            page = PooledPage(key, extents, self._memory.buffers(extents, space.page_bytes), deletions)
            self._unlisted.add(page)
            return page

    def room(self, space: PoolSpace) -> int:
        """Return how many more pages of a namespace fit without an eviction."""
        with self._lock:
            return max(0, min(self._memory.free, self._left(space))) // space.units

    def _may_enter(self, space: PoolSpace, deletions: int) -> bool:
        return not space.deleting and space.deletions == deletions

    def _is_asked_again(self, space: PoolSpace, key: bytes) -> bool:
        """Record that a page was requested; return True if it was recorded before."""
        number = hash((space.namespace, key))
        if number in self._asked:
            del self._asked[number]
            return True
        self._asked[number] = None
        if len(self._asked) > _ASKED_MAX:
            self._asked.popitem(last=False)
        return False

    def _left(self, space: PoolSpace) -> int:
        """Return the units that a namespace may still use within its quota."""
        if space.quota_bytes is None:
            return self._memory.units
        return space.quota_bytes // self._memory.unit_bytes - space.used_units

    def _make_room(self, space: PoolSpace, since: int) -> bool:
        if self._adaptive is not None:
            self._fit(self._adaptive.pages)
        if space.units > self._memory.units or not self._evict_own(space, space.units, since):
            return False
        while self._memory.free < space.units:
            oldest = [(found[1], other) for other in self._spaces.values() if (found := other.order.oldest())]
            if not any(self._evict(other, since) for _, other in sorted(oldest, key=lambda pair: pair[0])):
                return False
        return True

    def _fit(self, shadow_pages: int) -> None:
        """Start the tournament again if the full pool has a quarter more or fewer pages than its shadows: a page of
        other namespaces may have another size."""
        pages = sum(len(space.pages) for space in self._spaces.values())
        if pages and abs(pages - shadow_pages) > shadow_pages // 4:
            self._adaptive = AdaptivePages(pages)
            for space in self._spaces.values():
                space.order.adaptive = self._adaptive.of(space.namespace)

    def _evict_own(self, space: PoolSpace, units: int, since: int) -> bool:
        """Evict pages of a namespace until its quota allows `units`; return False if that is not possible."""
        while self._left(space) < units:
            if not self._evict(space, since):
                return False
        return True

    def _evict(self, space: PoolSpace, since: int) -> bool:
        """Evict the oldest evictable page of a space; return False if there is none."""
        while (key := space.order.victim(since)) is not None:
            page = space.pages[key]
            if not page.holders and not page.is_pinned:
                self._drop(space, page)
                space.accounts.left([key], page.loss)
                self._evicted += 1
                return True
            space.order.use([page.key])  # it stays, as if it was just used
        return False

    def publish(self, space: PoolSpace, page: PooledPage, holders: int = 0) -> bool:
        """Make a filled and verified page visible, already held `holders` times. Return False, and free its memory, if
        it does not enter, because it was deleted or another reader was faster.

        REQUIRES: `use` follows after the whole batch was published.
        """
        parent = bytes(page.buffers[0][PARENT])
        with self._lock:
            self._unlisted.discard(page)
            if page.key in space.pages or not self._may_enter(space, page.deletions):
                self._give_back(space, page)
                return False
            page.is_listed, page.holders = True, holders
            space.pages[page.key] = page
            space.order.add(page.key, None if parent in (NO_PARENT, page.key) else parent)
            self._admitted += 1
            return True

    def abandon(self, space: PoolSpace, page: PooledPage) -> None:
        """Free a reserved page that was not filled, or is damaged."""
        with self._lock:
            self._unlisted.discard(page)
            self._give_back(space, page)

    # Pages in the pool

    def has(self, space: PoolSpace, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its page is in the pool. Does not refresh recency."""
        with self._lock:
            return [key in space.pages for key in keys]

    def keys(self, space: PoolSpace, prefix: str) -> list[bytes]:
        """Return the pages of a namespace whose keys begin with these hexadecimal digits, the next victim first."""
        with self._lock:
            keys = list(space.order.keys())
        return [key for key in keys if key.hex().startswith(prefix)]

    def hold(self, space: PoolSpace, keys: Sequence[bytes]) -> list[PooledPage | None]:
        """Return the pages in the pool, each to be released; their bytes do not change while they are held."""
        with self._lock:
            found = [space.pages.get(key) for key in keys]
            for page in found:
                if page is not None:
                    page.holders += 1
            return found

    def hold_again(self, page: PooledPage) -> None:
        """Hold a held page again, for another reader."""
        with self._lock:
            page.holders += 1

    def release(self, space: PoolSpace, pages: Sequence[PooledPage]) -> None:
        """End the hold of each of these pages."""
        with self._lock:
            for page in pages:
                page.holders -= 1
                if not page.is_listed and not page.holders:
                    self._unlisted.discard(page)
                    self._give_back(space, page)

    def use(self, space: PoolSpace, keys: Sequence[bytes]) -> None:
        """Record the use of the pages of a batch, head first; pages outside the pool are skipped."""
        with self._lock:
            space.order.use(keys)

    def hit(self, space: PoolSpace, keys: Sequence[bytes]) -> None:
        """As `use`, for pages that a request has read, head first; also counts them for adaptive eviction and, if they
        are in the pool, for `hot`."""
        with self._lock:
            if space.order.adaptive is not None and keys:
                space.order.adaptive.use(keys, space.order.parent_of(keys[0]))
            space.order.use(keys)
            pages = [page for key in keys if (page := space.pages.get(key))]
            if pages:
                self._hot.note(space.label, [page.key for page in pages], [page.hits for page in pages])

    def offer(self, space: PoolSpace, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        """Note that a request hands over pages, head first, after `parent`, which counts as used. Call it before they
        enter: the shadows of adaptive eviction make room before the pool does."""
        with self._lock:
            if parent is not None:
                space.order.use([parent])
            if space.order.adaptive is not None:
                space.order.adaptive.use(keys, parent)

    def touch(self, space: PoolSpace, keys: Sequence[bytes]) -> list[bool]:
        """As `use`, for pages that a request touches; also counts them for adaptive eviction. Return as `has`."""
        with self._lock:
            space.order.use(keys)
            present = [key in space.pages for key in keys]
            if space.order.adaptive is not None:
                space.order.adaptive.use([key for key in keys if key in space.pages])
            return present

    def hot(self) -> tuple[HotPrefix, ...]:
        """Return the chains with the most recent hits, the hottest first."""
        with self._lock:
            return self._hot.hottest()

    def pin(self, space: PoolSpace, keys: Sequence[bytes]) -> int:
        """Pin those of these pages that are in the pool, up to half of the pool: they are not evicted. Return how many
        of them are pinned now."""
        with self._lock:
            pinned = 0
            for page in filter(None, map(space.pages.get, keys)):
                if not page.is_pinned and self._pinned_units + space.units <= PINNED_SHARE_MAX * self._memory.units:
                    page.is_pinned = True
                    self._pinned_units += space.units
                pinned += page.is_pinned
            return pinned

    def unpin(self, space: PoolSpace, keys: Sequence[bytes]) -> int:
        """End the pins of pages; return how many were pinned."""
        with self._lock:
            pages = [page for key in dict.fromkeys(keys) if (page := space.pages.get(key)) and page.is_pinned]
            for page in pages:
                self._unpin(space, page)
            return len(pages)

    def _unpin(self, space: PoolSpace, page: PooledPage) -> None:
        self._pinned_units -= space.units * page.is_pinned
        page.is_pinned = False

    # Pages that leave

    @contextlib.contextmanager
    def deleting(self, space: PoolSpace, keys: Sequence[bytes] | None) -> Iterator[set[bytes]]:
        """Surround a block that deletes `keys` (None: all) from the store: remove them from the pool first, pinned or
        not, and admit only pages that are requested after the block. Yields the keys that were in the pool."""
        with self._lock:
            space.deletions += 1
            space.deleting += 1
            there = set(space.pages) if keys is None else space.pages.keys() & set(keys)
            for key in there:
                self._drop(space, space.pages[key])
        space.accounts.left([*there] if keys is None else keys, (Reason.EVICTED, "cleared"))
        try:
            yield there
        finally:
            with self._lock:
                space.deletions += 1
                space.deleting -= 1

    def _drop(self, space: PoolSpace, page: PooledPage) -> None:
        """Make a page invisible, and free its memory unless it is held."""
        self._unpin(space, page)
        del space.pages[page.key]
        space.order.discard(page.key)
        page.is_listed = False
        if page.holders:
            self._unlisted.add(page)
        else:
            self._give_back(space, page)

    def clear(self, space: PoolSpace) -> int:
        """Remove all pages of a namespace from the pool, pinned or not; return their number."""
        with self.deleting(space, None) as there:
            return len(there)

    def drop(self, space: PoolSpace, keys: Sequence[bytes]) -> int:
        """Remove those of these pages that are not pinned from the pool; return their number. They may come back."""
        with self._lock:
            pages = [page for key in dict.fromkeys(keys) if (page := space.pages.get(key)) and not page.is_pinned]
            for page in pages:
                self._drop(space, page)
                space.accounts.left([page.key], page.loss)
            return len(pages)

    def losing(self, space: PoolSpace, key: bytes, loss: Kind | None) -> None:
        """Record the `loss` of a page, in the pool or not."""
        with self._lock:
            if (page := space.pages.get(key)) is not None:
                page.loss = loss
            else:
                space.accounts.left([key], loss)

    def _give_back(self, space: PoolSpace, page: PooledPage) -> None:
        page.buffers = []
        self._memory.give(page.extents)
        space.used_units -= space.units

    # The whole

    def statistics(self) -> PoolStatistics:
        """Return a snapshot. Does not block."""
        with self._lock:
            return PoolStatistics(
                capacity_bytes=self.capacity_bytes,
                used_bytes=(self._memory.units - self._memory.free) * self._memory.unit_bytes,
                pinned_bytes=self._pinned_units * self._memory.unit_bytes,
                pages=sum(len(space.pages) for space in self._spaces.values()),
                admitted=self._admitted,
                evicted=self._evicted,
            )

    def usage(self, space: PoolSpace, frame_bytes: int) -> Usage:
        """Return the pages of a namespace, as frames of `frame_bytes`."""
        with self._lock:
            limits = [self.capacity_bytes, *([] if space.quota_bytes is None else [space.quota_bytes])]
            return Usage(len(space.pages), len(space.pages) * frame_bytes, min(limits))

    def space_bytes(self, space: PoolSpace) -> int:
        """Return the bytes of a namespace, including those of pages that are entering or leaving."""
        with self._lock:
            return space.used_units * self._memory.unit_bytes

    def check(self) -> None:
        """Raise InvariantError if units, pages, order and sums contradict each other. REQUIRES: `use` has followed each
        batch that was published."""
        with self._lock:
            pages = [page for space in self._spaces.values() for page in space.pages.values()]
            extents = [*self._memory.extents(), *(e for page in [*pages, *self._unlisted] for e in page.extents)]
            end = 0
            for start, length in sorted(extents):
                if start != end or length < 1:
                    raise InvariantError(f"pool: unit {end} has no owner, or two")
                end = start + length
            if end != self._memory.units or self._memory.free != sum(length for _, length in self._memory.extents()):
                raise InvariantError("pool: the units do not add up")
            if self._pinned_units != sum(
                space.units for space in self._spaces.values() for page in space.pages.values() if page.is_pinned
            ):
                raise InvariantError("pool: the sum of pins does not match the pages")
            for space in self._spaces.values():
                space.order.check()
                if space.order.keys() != space.pages.keys():
                    raise InvariantError("pool: the order does not match the pages")
