"""HostPoolStorage: transfers pages between SGLang's host pools and storage, for SGLang's interfaces v1 and v2.

SGLang calls it from three threads: for lookups, reads and stores. Interface v1 is for the pool of full attention, `kv`,
and v2 for all pools of a model; a call of v2 has one deadline for all its pools. A call returns a result for each page;
SGLang uses the pages before the first failure. Its interface without zero copy has tensors in place of the pages of
`kv`; keys, namespace and stored bytes are those of v1.

Locking design: `_calls` is a deque, whose operations are atomic. `_is_stale` only ever becomes True. `_pools` grows
while SGLang starts, and single operations on it are atomic.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...backends.base import GetOutcome
from ...errors import InvalidInput
from ...frame import PageView
from ...keys import PAGE_KEY_BYTES, Namespace
from ..store import EngineStorage, PoolStorage
from .hits import ALL_PAGES, PoolHits, PoolTransfer, find_hits
from .identity import KV
from .pages import HostPages

logger = logging.getLogger(__name__)

# The most calls whose figures are stored for SGLang, which fetches them in each step; the oldest are dropped.
_CALLS_MAX = 1024


class Transferred(NamedTuple):
    """A call that transferred pages."""

    is_read: bool
    pages: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Pool:
    pages: HostPages
    store: PoolStorage


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pages of one pool, whose addresses were checked."""

    pool: _Pool
    keys: Sequence[bytes]
    views: Sequence[PageView]


class HostPoolStorage:
    """See the module's docstring. Owns `storage`. `is_current` is a cheap function that returns True while the weights
    cannot have changed since the start; after that, storage is no longer used, because its pages are of the old
    weights.

    A model without a pool `kv` keeps all its KV in other pools: then v1 has no bytes to move, and v2 decides alone.
    """

    def __init__(self, storage: EngineStorage, is_current: Callable[[], bool]) -> None:
        self._storage = storage
        self._pools: dict[str, _Pool] = {}
        self._is_current = is_current
        self._is_stale = False
        self._warned = False
        self._calls: deque[Transferred] = deque(maxlen=_CALLS_MAX)

    def add(self, name: str, pages: HostPages, namespace: Namespace) -> None:
        """Open a store for the pages of a pool. Blocks and raises as `EngineStorage.open`."""
        self._pools[name] = _Pool(pages, self._storage.open(namespace, name))

    # Interface v1

    def lookup(self, keys: Sequence[str]) -> int:
        """Return how many of `keys` are stored, up to the first missing one."""
        pool = self._pools.get(KV)
        return pool.store.lookup(_page_keys(keys)) if pool is not None and self._is_usable() else 0

    def read(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read pages into the host pool; return for each whether it arrived. Otherwise its memory is undefined."""
        if KV not in self._pools:
            return [self._is_usable()] * len(keys)
        return self._read(self._batch(KV, keys, host_indices), self._storage.deadline())

    def write(self, keys: Sequence[str], host_indices: torch.Tensor, prefix: Sequence[str] | None) -> list[bool]:
        """Store pages from the host pool; return for each whether it is stored now. `prefix` are the keys of the pages
        before them, None if SGLang does not pass them."""
        if KV not in self._pools:
            return [self._is_usable()] * len(keys)
        batch = self._batch(KV, keys, host_indices)
        if prefix is None and not self._warned:
            self._warned = True
            logger.warning(
                "SGLang does not pass the page before a batch, so a full store may evict the head of a prompt "
                'before its tail; add "hicache_storage_pass_prefix_keys": true to '
                "--hicache-storage-backend-extra-config"
            )
        return self._write(batch, _parent(prefix), self._storage.deadline())

    # Interface without zero copy, for the pages of v1

    def read_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Read pages into `targets`, tensors with the bytes of SGLang's `get_data_page`, or None for new ones. Return
        each page that arrived, None for others. The memory of their targets is undefined then."""
        pages = self._pool(KV).pages
        found = [pages.new_flat() if target is None else target for target in targets]
        hits = self._read(self._flat_batch(keys, found), self._storage.deadline())
        return [page if hit else None for page, hit in zip(found, hits, strict=True)]

    def write_flat(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> bool:
        """Store pages with the bytes of `get_data_page`; return whether all are stored now. SGLang does not pass the
        page before them."""
        return all(self._write(self._flat_batch(keys, values), None, self._storage.deadline()))

    # Interface v2

    def find(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolHits:
        """Return which prefixes of `keys` the policies of all pools allow. Raises InvalidInput for an unknown pool."""
        wanted = [(transfer, self._pool(transfer.name).store) for transfer in transfers]
        found = _page_keys(keys)
        if not self._is_usable():
            return PoolHits([], {})
        deadline = self._storage.deadline()
        pool = self._pools.get(KV)
        if pool is not None:
            kv_pages = pool.store.lookup(found, deadline)
        else:
            # The other pools decide. A window or a state alone does not vouch for the pages before it.
            kv_pages = len(found) if any(transfer.hit_policy == ALL_PAGES for transfer in transfers) else 0
        return find_hits(found, kv_pages, wanted, deadline)

    def read_pools(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Read pages of several pools; see `read`. Raises InvalidInput, before anything is read, for a wrong index."""
        batches = [(one.name, self._batch(one.name, one.keys or (), one.host_indices)) for one in transfers]
        deadline, found = self._storage.deadline(), dict[str, list[bool]]()
        for name, batch in batches:
            found.setdefault(name, []).extend(self._read(batch, deadline))
        return found

    def write_pools(self, transfers: Sequence[PoolTransfer], prefix: Sequence[str] | None) -> dict[str, list[bool]]:
        """Store pages of several pools, all after the pages `prefix`; see `write`. Raises InvalidInput, before anything
        is stored, for a wrong index.

        The page before a window or a state is usually not stored in its pool. So these pages begin a chain.
        """
        batches = [(one, self._batch(one.name, one.keys or (), one.host_indices)) for one in transfers]
        deadline, found = self._storage.deadline(), dict[str, list[bool]]()
        for one, batch in batches:
            parent = _parent(prefix) if one.hit_policy == ALL_PAGES else None
            found.setdefault(one.name, []).extend(self._write(batch, parent, deadline))
        return found

    # All pools

    def clear(self) -> int:
        """Remove all pages of this rank's namespaces; return their number."""
        deadline = self._storage.deadline()
        return sum(pool.store.clear(deadline) for pool in self._pools.values())

    def take_transfers(self) -> list[Transferred]:
        """Return the calls since the last time that transferred pages, for SGLang's own metrics."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def close(self) -> bool:
        return self._storage.close()

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            raise InvalidInput(f"sglang: the host pool {str(name)[:40]!r} was not registered; register it first")
        return pool

    def _batch(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> _Batch:
        pool = self._pool(name)
        indices = torch.empty(0, dtype=torch.int64) if host_indices is None else host_indices
        return _Batch(pool, _page_keys(keys), pool.pages.views(indices, len(keys)))

    def _flat_batch(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> _Batch:
        if len(keys) != len(pages):
            raise InvalidInput(f"sglang: {len(keys)} keys for {len(pages)} pages; pass a tensor for each key")
        pool = self._pool(KV)
        return _Batch(pool, _page_keys(keys), [pool.pages.flat_view(page) for page in pages])

    def _read(self, batch: _Batch, deadline: float) -> list[bool]:
        if not self._is_usable():
            return [False] * len(batch.keys)
        began_s = time.perf_counter()
        hits = [one is GetOutcome.HIT for one in batch.pool.store.read(batch.keys, batch.views, deadline)]
        self._note(True, batch.pool, sum(hits), began_s)
        return hits

    def _write(self, batch: _Batch, parent: bytes | None, deadline: float) -> list[bool]:
        if not self._is_usable():
            return [False] * len(batch.keys)
        began_s = time.perf_counter()
        stored = [one.is_stored for one in batch.pool.store.write(batch.keys, batch.views, parent, deadline)]
        self._note(False, batch.pool, sum(stored), began_s)
        return stored

    def _is_usable(self) -> bool:
        if not self._is_stale and not self._is_current():
            self._is_stale = True
            logger.warning(
                "SGLang changed its weights or flushed its caches, so HiCache stops using storage, whose pages belong "
                "to the weights at the start. To use it for new weights, detach and attach it (DELETE, PUT "
                '/hicache/storage-backend) with another "model"; if weights never change while SGLang runs, set '
                '"fixed_weights": true'
            )
        return not self._is_stale

    def _note(self, is_read: bool, pool: _Pool, pages: int, began_s: float) -> None:
        seconds = time.perf_counter() - began_s
        if pages:
            size = pages * pool.pages.shape.payload_bytes
            self._calls.append(Transferred(is_read, pages, size / max(seconds, 1e-9)))


def _parent(prefix: Sequence[str] | None) -> bytes | None:
    """Return the key of the last page before a batch."""
    return _page_keys(prefix[-1:])[0] if prefix else None


def _page_keys(keys: Sequence[str]) -> list[bytes]:
    """Return SGLang's keys as bytes. Raises InvalidInput for anything but 64 hexadecimal digits."""
    try:
        found = [bytes.fromhex(key) for key in keys]
    except (TypeError, ValueError):
        found = [b""]
    if any(len(key) != PAGE_KEY_BYTES for key in found):
        raise InvalidInput("sglang: a page key is not 64 hexadecimal digits; HiCache needs SGLang's own page hashes")
    return found
