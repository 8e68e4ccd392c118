"""Probes: test calls by which a store finds out whether it works. They take the same path as pages.

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

from ...frame import HEADER_BYTES
from ...keys import PAGE_KEY_BYTES
from ..attempts import Attempts
from ..base import GetOutcome, SetOutcome
from ..errors import ErrorKind

# Probe pages that could not be removed and are remembered. They take space in the store, so they must be few.
_LEFTOVER_MAX = 16


class Prober:
    """Makes probes by `attempts`, with pages of `frame_bytes`. Each probe returns whether the store works, whether it
    stored a page, and the kinds of the errors on the way."""

    def __init__(self, attempts: Attempts, frame_bytes: int) -> None:
        self._attempts = attempts
        self._frame_bytes = frame_bytes
        self._leftover: deque[bytes] = deque(maxlen=_LEFTOVER_MAX)

    def write(self, deadline: float) -> tuple[bool, bool, list[str]]:
        """Store a page, read it back and remove it. The store works also if it is full, if only the part with this page
        is down, or if it does not find the page (reads may lag behind writes)."""
        key, frame = os.urandom(PAGE_KEY_BYTES), self._frame()
        frame[HEADER_BYTES : HEADER_BYTES + 1] = b"\1"
        (stored,), errors = self._attempts.write([key], [frame], None, deadline)
        if stored is SetOutcome.REJECTED or errors == [ErrorKind.NODE_DOWN]:
            return True, False, errors
        if not stored.is_stored:
            self._leftover.append(key)  # the page may have been written despite the error
            return False, False, errors
        works, _, more = self._read(key, deadline)
        keys = [key, *self._leftover]
        self._leftover.clear()
        removed, others = self._attempts.remove(keys, deadline)
        if not removed:
            self._leftover.extend(keys)
        return works, works, [*errors, *others, *more]

    def read(self, deadline: float) -> tuple[bool, bool, list[str]]:
        """Read a random key."""
        return self._read(os.urandom(PAGE_KEY_BYTES), deadline)

    def _read(self, key: bytes, deadline: float) -> tuple[bool, bool, list[str]]:
        (found,), errors = self._attempts.read([key], [self._frame()], deadline)
        return found in (GetOutcome.MISS, GetOutcome.HIT) or errors == [ErrorKind.NODE_DOWN], False, errors

    def _frame(self) -> memoryview:
        # New for each probe: a thread that hangs in the store may still write into its frame. Aligned for direct I/O.
        return memoryview(mmap.mmap(-1, self._frame_bytes))[: self._frame_bytes]
