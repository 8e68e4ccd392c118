"""Memory of fixed size, allocated in units, and copies between buffers.

Locking design: `UnitMemory` belongs to its pool, which locks it. Copies run without Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ..mapping import zeroed

# Consecutive units: (first unit, number of units).
Extent: TypeAlias = tuple[int, int]


class UnitMemory:
    """One mapping cut into `units` units of `unit_bytes`. Units that were freed last are used first: they are warm, and
    a page that replaces one of its size stays in one piece.

    The constructor touches the memory, about a quarter of a second per GiB, so that missing memory fails here, not in a
    request. Raises OSError.

    Invariant: `_lengths` has the length of each free extent by its start, `_starts` its start by its end; no two of
    them touch; `free` is the sum of the lengths.
    """

    def __init__(self, units: int, unit_bytes: int) -> None:
        self.units = units
        self.unit_bytes = unit_bytes
        self.free = 0
        self._memory = zeroed(units * unit_bytes)
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        if units:
            self.give([(0, units)])

    def take(self, units: int) -> list[Extent]:
        """Allocate units, in as few extents as the last freed ones allow. REQUIRES: enough are free."""
        found: list[Extent] = []
        self.free -= units
        while units:
            start, length = self._lengths.popitem()
            del self._starts[start + length]
            taken = min(length, units)
            if taken < length:
                self._insert(start + taken, length - taken)
            found.append((start, taken))
            units -= taken
        return found

    def give(self, extents: Sequence[Extent]) -> None:
        for first, count in extents:
            self.free += count
            start, end = first, first + count
            if first in self._starts:
                start = self._starts.pop(first)
                del self._lengths[start]
            if end in self._lengths:
                end += self._lengths.pop(end)
                del self._starts[end]
            self._insert(start, end - start)

    def _insert(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._starts[start + length] = start

    def buffers(self, extents: Sequence[Extent], size: int) -> list[memoryview]:
        """Return the first `size` bytes of these extents."""
        found: list[memoryview] = []
        for start, length in extents:
            first = start * self.unit_bytes
            found.append(self._memory[first : first + min(length * self.unit_bytes, size)])
            size -= found[-1].nbytes
        return found

    def extents(self) -> list[Extent]:
        """Return the free extents, for tests of the invariant."""
        return list(self._lengths.items())


def copy_buffers(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy the bytes of `sources` to the start of `targets`, without the interpreter's lock. REQUIRES: they fit."""
    rest = iter(targets)
    target = np.empty(0, np.uint8)
    for view in sources:
        source = np.frombuffer(view, np.uint8)
        while source.size:
            if not target.size:
                target = np.frombuffer(next(rest), np.uint8)
            size = min(source.size, target.size)
            np.copyto(target[:size], source[:size])
            source, target = source[size:], target[size:]
