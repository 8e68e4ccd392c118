"""HostPoolStorage: transfers pages between SGLang's host pool and storage, for SGLang's interface v1.

SGLang calls it from three threads: for lookups, reads and stores. A call returns a result for each page; SGLang uses
the pages before the first failure.

Locking design: `_calls` is a deque, whose operations are atomic. `_is_stale` only ever becomes True.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...backends.base import GetOutcome
from ...errors import InvalidInput
from ...keys import PAGE_KEY_BYTES
from ..store import EngineStorage
from .pages import HostPages

logger = logging.getLogger(__name__)

# The most calls whose figures are stored for SGLang, which fetches them in each step; the oldest are dropped.
_CALLS_MAX = 1024


class Transfer(NamedTuple):
    """A call that transferred pages."""

    is_read: bool
    pages: int
    bytes_per_s: float


class HostPoolStorage:
    """See the module's docstring. Owns `storage`. `is_current` is a cheap function that returns True while the weights
    cannot have changed since the start; after that, storage is no longer used, because its pages are of the old
    weights.
    """

    def __init__(self, storage: EngineStorage, pages: HostPages, is_current: Callable[[], bool]) -> None:
        self._storage = storage
        self._pages = pages
        self._is_current = is_current
        self._is_stale = False
        self._warned = False
        self._calls: deque[Transfer] = deque(maxlen=_CALLS_MAX)

    def lookup(self, keys: Sequence[str]) -> int:
        """Return how many of `keys` are stored, up to the first missing one."""
        return self._storage.lookup(_page_keys(keys)) if self._is_usable() else 0

    def read(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read pages into the host pool; return for each whether it arrived. Otherwise its memory is undefined."""
        pages = self._pages.views(host_indices, len(keys))
        if not self._is_usable():
            return [False] * len(keys)
        began_s = time.perf_counter()
        hits = [outcome is GetOutcome.HIT for outcome in self._storage.read(_page_keys(keys), pages)]
        self._note(True, sum(hits), began_s)
        return hits

    def write(self, keys: Sequence[str], host_indices: torch.Tensor, prefix: Sequence[str] | None) -> list[bool]:
        """Store pages from the host pool; return for each whether it is stored now. `prefix` are the keys of the pages
        before them, None if SGLang does not pass them."""
        pages = self._pages.views(host_indices, len(keys))
        if prefix is None and not self._warned:
            self._warned = True
            logger.warning(
                "SGLang does not pass the page before a batch, so a full store may evict the head of a prompt "
                'before its tail; add "hicache_storage_pass_prefix_keys": true to '
                "--hicache-storage-backend-extra-config"
            )
        if not self._is_usable():
            return [False] * len(keys)
        parent = _page_keys(prefix[-1:])[0] if prefix else None
        began_s = time.perf_counter()
        stored = [outcome.is_stored for outcome in self._storage.write(_page_keys(keys), pages, parent)]
        self._note(False, sum(stored), began_s)
        return stored

    def clear(self) -> int:
        """Remove all pages of this rank's namespace; return their number."""
        return self._storage.clear()

    def take_transfers(self) -> list[Transfer]:
        """Return the calls since the last time that transferred pages, for SGLang's own metrics."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def close(self) -> bool:
        """See EngineStorage."""
        return self._storage.close()

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

    def _note(self, is_read: bool, pages: int, began_s: float) -> None:
        seconds = time.perf_counter() - began_s
        if pages:
            self._calls.append(Transfer(is_read, pages, pages * self._pages.shape.payload_bytes / max(seconds, 1e-9)))


def _page_keys(keys: Sequence[str]) -> list[bytes]:
    """Return SGLang's keys as bytes. Raises InvalidInput for anything but 64 hexadecimal digits."""
    try:
        found = [bytes.fromhex(key) for key in keys]
    except (TypeError, ValueError):
        found = [b""]
    if any(len(key) != PAGE_KEY_BYTES for key in found):
        raise InvalidInput("sglang: a page key is not 64 hexadecimal digits; HiCache needs SGLang's own page hashes")
    return found
