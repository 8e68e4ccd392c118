"""Probes: test calls by which a guard finds out whether a store works. They take the same path as pages.

A write probe stores a page under a random key, reads it back and removes it. A read probe reads a random key; a miss is
a good answer. Probe pages do no harm: no engine requests their keys. If one cannot be removed, a later probe removes it
or the store evicts it as unused.

Locking design: one thread at a time uses a `Prober`. A thread that hangs in the store is replaced; when it returns, it
touches only `_leftover`, whose single operations are atomic.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable

from ...frame import HEADER_BYTES
from ...keys import PAGE_KEY_BYTES
from ..base import GetOutcome, SetOutcome, StorageBackend

# Probe pages that could not be removed and are remembered. They take space in the store, so they must be few.
_LEFTOVER_MAX = 16


class Prober:
    """Probes `backend`. `contain` makes a call and returns its result, or None if it raises."""

    def __init__(self, backend: StorageBackend, contain: Callable[[Callable[[], object]], object]) -> None:
        self._backend = backend
        self._contain = contain
        self._leftover: deque[bytes] = deque(maxlen=_LEFTOVER_MAX)

    def write(self, deadline: float) -> bool:
        """Store a page, read it back and remove it. Return True if the store works: also if it is full, or if it does
        not find the page (reads may lag behind writes)."""
        key, frame = os.urandom(PAGE_KEY_BYTES), self._frame()
        frame[HEADER_BYTES : HEADER_BYTES + 1] = b"\1"
        stored = self._contain(lambda: self._backend.batch_set([key], [frame], parent=None, deadline=deadline))
        if stored == [SetOutcome.REJECTED]:
            return True
        if stored not in ([SetOutcome.STORED], [SetOutcome.PRESENT]):
            self._leftover.append(key)  # the page may have been written despite the error
            return False
        found = self._get(key, deadline)
        keys = [key, *self._leftover]
        self._leftover.clear()
        if self._contain(lambda: self._backend.delete(keys, deadline=deadline)) in (None, 0):
            self._leftover.extend(keys)
        return found

    def read(self, deadline: float) -> bool:
        """Read a random key; return True if the store works."""
        return self._get(os.urandom(PAGE_KEY_BYTES), deadline)

    def _get(self, key: bytes, deadline: float) -> bool:
        frame = self._frame()
        found = self._contain(lambda: self._backend.batch_get([key], [frame], deadline=deadline))
        return found in ([GetOutcome.MISS], [GetOutcome.HIT])

    def _frame(self) -> memoryview:
        # New for each probe: a thread that hangs in the store may still write into its frame. Aligned for direct I/O.
        size = self._backend.codec.frame_bytes
        return memoryview(mmap.mmap(-1, size))[:size]
