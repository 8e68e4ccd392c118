"""Probes: what a guard asks of a store in order to learn whether it works, on the path that pages take.

A write probe stores a page of the guard's own under a random key, reads it back and removes it. A read probe reads a
page under a random key: that it is missing is a good answer. One page cannot be in the way of others: no engine asks
for its key, and a page that could not be removed is removed by a later probe, or goes as any page does that is not
used.

Locking design: a `Prober` is used by one thread at a time; a thread that hangs in the store is replaced and comes back
to `_leftover` alone, whose entries are added and taken one by one.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable

from ...frame import HEADER_BYTES
from ...keys import PAGE_KEY_BYTES
from ..base import GetOutcome, SetOutcome, StorageBackend

# Pages of probes that could not be removed. They take room in the store, so they are few.
_LEFTOVER_MAX = 16


class Prober:
    """Probes `backend`. `contain` calls it and gives None for what it raises."""

    def __init__(self, backend: StorageBackend, contain: Callable[[Callable[[], object]], object]) -> None:
        self._backend = backend
        self._contain = contain
        self._leftover: deque[bytes] = deque(maxlen=_LEFTOVER_MAX)

    def write(self, deadline: float) -> bool:
        """Store, read back, remove; True if the store works. A full store does; where reading lags behind, so does one
        that does not find the page."""
        key, frame = os.urandom(PAGE_KEY_BYTES), self._frame()
        frame[HEADER_BYTES : HEADER_BYTES + 1] = b"\1"
        stored = self._contain(lambda: self._backend.batch_set([key], [frame], parent=None, deadline=deadline))
        if stored == [SetOutcome.REJECTED]:
            return True
        if stored not in ([SetOutcome.STORED], [SetOutcome.PRESENT]):
            self._leftover.append(key)  # it may have been written all the same
            return False
        found = self._get(key, deadline)
        keys = [key, *self._leftover]
        self._leftover.clear()
        if self._contain(lambda: self._backend.delete(keys, deadline=deadline)) in (None, 0):
            self._leftover.extend(keys)
        return found

    def read(self, deadline: float) -> bool:
        """Read a page that is not there; True if the store works."""
        return self._get(os.urandom(PAGE_KEY_BYTES), deadline)

    def _get(self, key: bytes, deadline: float) -> bool:
        frame = self._frame()
        found = self._contain(lambda: self._backend.batch_get([key], [frame], deadline=deadline))
        return found in ([GetOutcome.MISS], [GetOutcome.HIT])

    def _frame(self) -> memoryview:
        # A fresh one each time: a thread that hangs in the store may still write into its own. Aligned, for direct I/O.
        size = self._backend.codec.frame_bytes
        return memoryview(mmap.mmap(-1, size))[:size]
