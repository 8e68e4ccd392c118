"""Probes: what a guard asks of a store in order to learn whether it works, on the path that pages take.

A write probe stores a page of the guard's own under a random key, reads it back and removes it. A read probe reads a
page under a random key: that there is none is a good answer. One page cannot be in the way of anybody: nobody asks for
its key, and what could not be removed is removed by a later probe, or goes as any page does that nobody uses.

Locking design: a `Prober` is used by one thread at a time; a thread that hangs in the store is replaced and comes back
to fields that it does not write any more but `_leftover`, whose entries are added and taken one by one.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable

from ...frame import HEADER_BYTES
from ...keys import PAGE_KEY_BYTES
from ..base import GetOutcome, SetOutcome, StorageBackend
from .options import Direction
from .traffic import Traffic, Verdict

# Pages of probes that could not be removed. They take room in the store, so they are few.
_LEFTOVER_MAX = 16

Contain = Callable[[Callable[[], object]], object]


class Prober:
    """Carries out the probes that are due. `contain` calls the store and gives None for what it raises."""

    def __init__(self, backend: StorageBackend, traffic: Traffic, contain: Contain) -> None:
        self._backend = backend
        self._traffic = traffic
        self._contain = contain
        self._leftover: deque[bytes] = deque(maxlen=_LEFTOVER_MAX)

    def run(self) -> float:
        """Probe what is due; when the next is. Blocks as the store does."""
        for direction in Direction:
            probe = self._traffic.begin_probe(direction)
            if probe is None:
                continue
            verdict = Verdict(False, "probe")
            try:
                if direction is Direction.WRITE or probe.thorough:
                    verdict = self._write(probe.deadline, probe.thorough)
                else:
                    verdict = self._read(probe.deadline)
            finally:
                self._traffic.probed(probe, verdict)
        return self._traffic.probe_at

    def _write(self, deadline: float, thorough: bool) -> Verdict:
        """Store, read back, remove. A full store is well; where reading lags behind, so is a page not found."""
        key, frame = os.urandom(PAGE_KEY_BYTES), self._frame()
        frame[HEADER_BYTES : HEADER_BYTES + 1] = b"\1"
        backend = self._backend
        stored = self._contain(lambda: backend.batch_set([key], [frame], parent=None, deadline=deadline))
        if stored == [SetOutcome.REJECTED] and not thorough:
            return Verdict(True)
        if stored not in ([SetOutcome.STORED], [SetOutcome.PRESENT]):
            self._leftover.append(key)  # it may have been written all the same
            return Verdict(False, "probe")
        back = self._frame()
        found = self._contain(lambda: backend.batch_get([key], [back], deadline=deadline))
        self._remove(key, deadline)
        well = [GetOutcome.HIT] if thorough else [GetOutcome.HIT, GetOutcome.MISS]
        return Verdict(True) if found in [[outcome] for outcome in well] else Verdict(False, "probe")

    def _read(self, deadline: float) -> Verdict:
        key, frame = os.urandom(PAGE_KEY_BYTES), self._frame()
        found = self._contain(lambda: self._backend.batch_get([key], [frame], deadline=deadline))
        return Verdict(True) if found in ([GetOutcome.MISS], [GetOutcome.HIT]) else Verdict(False, "probe")

    def _remove(self, key: bytes, deadline: float) -> None:
        keys = [key, *self._leftover]
        self._leftover.clear()
        if self._contain(lambda: self._backend.delete(keys, deadline=deadline)) in (None, 0):
            self._leftover.extend(keys)

    def _frame(self) -> memoryview:
        # A fresh one each time: a thread that hangs in the store may still write into its own. Aligned, for direct I/O.
        size = self._backend.codec.frame_bytes
        return memoryview(mmap.mmap(-1, size))[:size]
