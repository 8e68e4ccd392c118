"""The trailing pools of a cache: which prefixes on L1 can be used, and the slots that requests and copies hold.

Rule of a hit: the last `trailing_pages` pages of the prefix on L1 have a slot in each pool, or a copy on L2 from which
`begin` fills one. Pages that are on L2 only can always be used after such a prefix, because frames have the pieces of
all pools. A page is copied to L2 only while it has all slots, so no frame lacks a part.

A request holds the slots of the last pages before its next token, of the pages that it computes, and of those that it
has computed and will share: once they are shared, the copy to L2 holds them.

Called by the scheduler thread only; no lock. Invariant, verified by `check()`: each pool's slots are consistent, and
without requests and copies none is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arguments import instance, whole
from ..controller import HiCacheController, Load
from ..errors import InvalidInput, InvariantError
from ..radix import Match, Node, RadixTree
from ..tiers import KVPool, PageAllocator, TrailingPool
from ..types import PageIds
from .requests import RequestKV
from .verification import LoadVerifier


class TrailingTier:
    """See the module's docstring. Without `pools`, every method returns at once.

    `device` is L1. Loads go through `controller`, of frames that `verifier`, if any, allows.
    """

    def __init__(
        self, pools: Sequence[TrailingPool], device: KVPool, controller: HiCacheController | None = None,
        verifier: LoadVerifier | None = None,
    ) -> None:
        self.pools = pools
        self._page_size = device.geometry.page_size
        self._controller = controller
        self._verifier = verifier
        self._loads: dict[Load, tuple[RadixTree, Node, list[PageIds]]] = {}
        first_layer = device.geometry.layers
        for pool in pools:
            allocator = instance("trailing: the free list of L1", device.allocator, PageAllocator)
            pool.attach(self._page_size, allocator.first + allocator.capacity, first_layer)
            most = pool.trailing_pages if controller is None else controller.config.load_pages_max
            if pool.trailing_pages > most:
                raise InvalidInput(
                    f"trailing pool {pool.name}: a request loads {pool.trailing_pages} pages at once, the queue has "
                    f"room for {most}; use larger pages"
                )
            pool.pool.main = device
            first_layer += len(pool.pieces)
            allocator.freed.append(pool.drop)

    def may_load(self, node: Node) -> bool:
        """Return True if the frames of `node` on L2 may be loaded."""
        return self._verifier is None or self._verifier.may_load(node)

    def usable(self, match: Match) -> int:
        """Return how many of the L1 pages of `match` can be a request's prefix."""
        if not self.pools or not match.device_count:
            return match.device_count
        pages = match.device_pages
        lengths = np.arange(1, len(pages) + 1)
        allowed = np.ones(len(pages), np.bool_)
        on_host = self._on_host(match.device_node, len(pages)) >= 0
        for pool in self.pools:
            present = on_host | (pool.slots(pages) > 0)
            last_missing = np.maximum.accumulate(np.where(present, 0, lengths))
            allowed &= lengths - last_missing >= np.minimum(pool.trailing_pages, lengths)
        return int(lengths[allowed].max(initial=0))

    def begin(self, request: RequestKV) -> bool:
        """Hold the slots that a new request needs of its shared pages, and load those that are not filled.

        Return False, holding nothing, if there is no room for the slots or the load now. REQUIRES: its prefix is as
        `usable` said, and locked.
        """
        if not self.pools:
            return True
        shared = request.shared_pages
        tails = [request.pages[max(0, shared - pool.trailing_pages) : shared] for pool in self.pools]
        lacking = [tail[pool.slots(tail) == 0] for pool, tail in zip(self.pools, tails, strict=True)]
        loaded = np.flatnonzero(np.isin(request.pages[:shared], np.concatenate(lacking)))
        tree, node, controller = request.tree, request.last_node, self._controller
        host_pages = self._on_host(node, shared)[loaded]
        if controller is None or len(loaded) > controller.load_room or (host_pages < 0).any():
            return False
        if not self._hold(tails, from_host=True):
            return False
        request.trailing = [(shared - len(tail), shared) for tail in tails]
        if len(loaded):
            tree.lock(node)
            tree.hold_host(node)
            self._hold(lacking)
            after = controller.fences.latest  # forwards up to now may read the slots
            load = controller.submit_load(host_pages, -request.pages[loaded], after)
            self._loads[load] = tree, node, lacking
        return True

    def loaded(self, load: Load) -> bool:
        """Handle the end of a load, successful or not. Return False if it is not a load of this class."""
        if load not in self._loads:
            return False
        tree, node, pages = self._loads.pop(load)
        self._release(pages)
        tree.release_host(node)
        tree.unlock(node)
        return True

    def prepare(self, request: RequestKV, start: int, end: int, *, shares: bool) -> bool:
        """As `TreeCache.prepare`. `shares`: the request will share what it computes."""
        page_size = self._page_size
        if not 0 <= whole("start", start) < whole("end", end) <= len(request.pages) * page_size:
            raise InvalidInput(
                f"request {request.rid!r}: tokens {start} to {end} in {len(request.pages)} pages; make room first"
            )
        if not self.pools:
            return True
        first, last = start // page_size, -(-end // page_size)
        pages, held = request.pages, request.trailing or [(0, 0)] * len(self.pools)
        shared = request.shared_pages if shares else first
        kept = [(max(begin, min(first - pool.trailing_pages, shared, stop)), stop)
                for pool, (begin, stop) in zip(self.pools, held, strict=True)]
        self._release([pages[begin:keep] for (begin, _), (keep, _) in zip(held, kept, strict=True)])
        request.trailing = kept
        if not self._hold([pages[stop:last] for _, stop in kept]):
            return False
        request.trailing = [(keep, max(last, stop)) for keep, stop in kept]
        return True

    def replace(self, pages: PageIds, others: PageIds) -> None:
        """Move slots and holds from a request's pages to the pages of the tree with the same content."""
        for pool in self.pools:
            pool.replace(pages, others)

    def end(self, request: RequestKV) -> None:
        """Release the slots of a request, before its pages are freed."""
        if request.trailing:
            self._release([request.pages[begin:stop] for begin, stop in request.trailing])
            request.trailing = []

    def may_copy(self, pages: PageIds) -> bool:
        """Return True if `pages` have all slots, so that they can be copied to L2."""
        return all((pool.slots(pages) > 0).all() for pool in self.pools)

    def copying(self, pages: PageIds) -> None:
        """Hold the slots of pages that are being copied to L2. REQUIRES: `may_copy`."""
        self._hold([pages] * len(self.pools))

    def copied(self, pages: PageIds, *, on_host: bool = True) -> None:
        """Release the slots of pages whose copy to L2 has ended; they are on L2 now unless it failed."""
        for pool in self.pools:
            pool.release(pages, on_host=on_host)

    def check(self, requests: Sequence[RequestKV], copying: Sequence[PageIds]) -> None:
        """Raises InvariantError if the holds are not those of `requests`, of the copies to L2 of `copying` and of the
        loads."""
        for index, pool in enumerate(self.pools):
            pool.check()
            parts = [one.pages[slice(*one.trailing[index])] for one in requests if one.trailing]
            parts += [*copying, *(pages[index] for _, _, pages in self._loads.values())]
            pages = np.concatenate([*parts, np.zeros(0, np.int32)])
            if pool.holds != len(pages) or not (pool.slots(pages) > 0).all():
                raise InvariantError(f"trailing pool {pool.name}: {pool.holds} holds for {len(pages)} pages in use")

    def _hold(self, pages: Sequence[PageIds], *, from_host: bool = False) -> bool:
        """Hold `pages` in each pool, or in none."""
        held: list[tuple[TrailingPool, PageIds, PageIds]] = []
        for pool, some in zip(self.pools, pages, strict=True):
            lacking = some[pool.slots(some) == 0]
            if not pool.hold(some, from_host=from_host):
                for other, undone, new in held:
                    other.release(undone)
                    other.drop(new)  # it is not filled
                return False
            held.append((pool, some, lacking))
        return True

    def _release(self, pages: Sequence[PageIds]) -> None:
        for pool, some in zip(self.pools, pages, strict=True):
            pool.release(some)

    def _on_host(self, node: Node, count: int) -> npt.NDArray[np.int32]:
        """Return the L2 pages of the path to `node`, which has `count` pages; -1 where none may be loaded."""
        pages = np.full(count, -1, np.int32)
        while node.parent is not None and node.device is not None:
            count -= len(node.device)
            if node.host is not None and self.may_load(node):
                pages[count : count + len(node.host)] = node.host
            node = node.parent
        return pages
