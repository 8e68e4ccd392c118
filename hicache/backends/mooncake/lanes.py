"""The way of some pages to the network and back: as they lie, or through the staging memory.

A lane belongs to one thread and is used once. `run` makes a library call with the addresses of the lane. A call that
touches registered buffers of others cannot be left: its lane waits for the library, whose own time limits bound it. A
call on staging memory alone can: its slots come back when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...frame import FRAME_ALIGN
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError
from .client import GRACE_S
from .staging import Staging

# A header of 256 bytes and the padding behind a payload, which are copied for a page whose parts are registered.
_LOOSE_BYTES_MAX = 2 * FRAME_ALIGN


class Lane:
    """The way of pages, each a list of buffers: where the library reads or writes each of them.

    `addresses` and `sizes` are lists per page, of one piece for a page that goes through a slot, and of one per buffer
    for a page in registered memory, of which only small buffers (a header) go through the slot. `is_staged` if all
    pages go through slots. The slots were taken for this lane, which gives them back.
    """

    def __init__(
        self, pages: Sequence[Sequence[memoryview]], addresses: Sequence[Sequence[int | None]], slots: list[int],
        staging: Staging, pool: SupervisedPool[Any],
    ) -> None:  # fmt: skip
        self.addresses: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self._slots = slots
        self._staging = staging
        self._pool = pool
        self._abandoned = False
        self.is_staged = all(one is None for page in addresses for one in page)
        # By page: its buffers that are copied, each with its place in the staging memory.
        self._copies: list[list[tuple[memoryview, memoryview]]] = []
        free = iter(slots)
        for buffers, places in zip(pages, addresses, strict=True):
            self._add(buffers, places, next(free) if None in places else -1)

    def __len__(self) -> int:
        return len(self.addresses)

    def _add(self, buffers: Sequence[memoryview], places: Sequence[int | None], slot: int) -> None:
        copied = end = 0
        copies: list[tuple[memoryview, memoryview]] = []
        pieces: list[tuple[int, int]] = []
        for buffer, place in zip(buffers, places, strict=True):
            size = buffer.nbytes
            end += size
            if place is None:
                copies.append((buffer, self._staging.view(slot)[copied : copied + size]))
                pieces.append((self._staging.address(slot) + copied, size))
                copied += size
            else:
                pieces.append((place, size))
        if copied == end:  # all of the page is in the slot, in one piece
            pieces = [(self._staging.address(slot), end)]
        self._copies.append(copies)
        self.addresses.append([address for address, size in pieces if size])
        self.sizes.append([size for _, size in pieces if size])

    def run(self, call: Callable[[], list[int]], deadline: float) -> list[int] | None:
        """The result of a library call, None if it has none in time: then this lane is spent. Blocks until the library
        returns, also past the deadline, unless all pages are in staging memory."""
        if not self.is_staged:
            return call()
        try:
            result = self._pool.call(call, deadline + GRACE_S, late=self._give_back)
        except NoThread:
            raise StoreError(ErrorKind.NO_THREAD) from None
        self._abandoned = result is None
        return result

    def load(self) -> None:
        """Have the bytes of the buffers where the library finds them."""
        for buffer, staged in itertools.chain.from_iterable(self._copies):
            staged[:] = buffer

    def fetch(self, index: int, size: int) -> None:
        """Have the `size` bytes that the library has read for a page in its buffers."""
        in_one_piece = len(self.sizes[index]) == 1  # such a page may be shorter than its buffers
        for buffer, staged in self._copies[index]:
            count = max(0, min(size, buffer.nbytes)) if in_one_piece else buffer.nbytes
            buffer[:count] = staged[:count]
            size -= count

    def leave(self) -> None:
        """Give back the slots, unless a call that was left still uses them."""
        if not self._abandoned:
            self._give_back()

    def _give_back(self, result: object = None) -> None:
        self._staging.give_back(self._slots)


class Roads:
    """Which lane pages take. `slow` is set from a failure that has cost time, or may cost it next time, until pages
    have been moved again: then registered pages are copied too, so that a verb can leave a call that hangs.

    Locking design: `_registered` only grows, and is replaced as a whole; `slow` is one reference. Both are read
    without a lock.
    """

    def __init__(self, staging: Staging, pool: SupervisedPool[Any]) -> None:
        self.slow = False
        self._staging = staging
        self._pool = pool
        self._registered: tuple[tuple[int, int], ...] = ()

    @property
    def registered(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each registered memory."""
        return self._registered

    def add(self, start: int, end: int) -> None:
        """Let buffers between these addresses go as they lie."""
        self._registered = (*self._registered, (start, end))

    @contextlib.contextmanager
    def lane(self, pages: Sequence[Sequence[memoryview]], deadline: float) -> Iterator[Lane | None]:
        """A lane for the first of `pages`, at least one; None if there is no staging memory in time."""
        addresses = [self._addresses(page) for page in pages]
        staged = [position for position, places in enumerate(addresses) if None in places]
        slots: list[int] = []
        count = len(pages)
        if staged:
            slots = self._staging.take(len(staged), deadline)
            if not slots:
                yield None
                return
            if len(slots) < len(staged):
                count = staged[len(slots)]
        lane = Lane(pages[:count], addresses[:count], slots, self._staging, self._pool)
        try:
            yield lane
        finally:
            lane.leave()

    def _addresses(self, page: Sequence[memoryview]) -> list[int | None]:
        """Where the library may use the buffers of a page as they lie: nowhere, unless it may use nearly all of them.
        """
        if self.slow or not self._registered:
            return [None] * len(page)
        places: list[int | None] = []
        loose = 0  # bytes that have to be copied
        for buffer in page:
            address = address_of(buffer) if buffer.nbytes else 0
            if not self._is_registered(address, buffer):
                loose += buffer.nbytes
                places.append(None)
            else:
                places.append(address)
        return places if loose < _LOOSE_BYTES_MAX else [None] * len(page)

    def _is_registered(self, address: int, buffer: memoryview) -> bool:
        for start, end in self._registered:  # noqa: SIM110  twice as fast as `any`, and once for each buffer
            if start <= address and address + buffer.nbytes <= end:
                return True
        return False


def address_of(memory: memoryview) -> int:
    """Where `memory` begins."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a fifth of the time
