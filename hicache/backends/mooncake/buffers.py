"""The path of pages between frames and the network: without a copy if their memory is registered, else through bounce
buffers.

A path belongs to one thread and is used once. `run` makes a library call with its addresses. A call on registered
frames cannot be abandoned: the thread waits for the library, which has its own time limits. A call only on bounce
buffers can be: its slots are released when it ends.

Locking design: `PathSelector._state` guards `_free`. The bytes of a slot belong to the path that took it, until the
path releases it. `registered` only grows and is replaced as a whole; `slow` is a single reference. Both are read
without a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...clock import SYSTEM_CLOCK, Clock
from ...errors import BackendError, InvariantError
from ...frame import FRAME_ALIGN
from ...mapping import address_of
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError
from .client import GRACE_S, Client

# A header of 256 bytes and the padding after a payload are copied even if the other buffers of a page are registered.
_LOOSE_BYTES_MAX = 2 * FRAME_ALIGN


class RegisteredMemory:
    """`size` bytes of memory from and to which the library, or a daemon, can move pages. The caller owns it. The
    constructor raises BackendError if the memory is not available."""

    def __init__(self, client: Client, size: int) -> None:
        self._client = client
        self._allocator: Any = client.allocator()
        self.size = size
        self.address = int(self._allocator.alloc(size))
        if not self.address:
            raise BackendError(
                f"mooncake store: {size} bytes of shared memory for staging are not available; lower `staging` or free "
                "memory"
            )
        try:
            client.register(self.address, size)
        except BackendError:
            self._allocator.free(self.address)
            raise
        self.memory = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")

    def free(self) -> None:
        """Return the memory to the system. REQUIRES: no call and no view uses it."""
        self._client.unregister(self.address, self.size)
        self.memory.release()
        self._allocator.free(self.address)


class PathSelector:
    """Chooses the path of pages. It has as many bounce buffers (slots) of `slot_bytes` as fit into `capacity_bytes`, at
    least one.

    `slow` is True after a failure that hung or may hang next time, until pages are moved again. While it is True,
    registered pages are also copied, so that a verb can abandon a hanging call. `registered` has the start and end
    address of each registered memory. Invariant: each slot is either free or taken by one path. The constructor raises
    BackendError without memory for them.
    """

    def __init__(
        self, client: Client, pool: SupervisedPool[Any], slot_bytes: int, capacity_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.clock = clock
        self.slow = False
        self.registered: tuple[tuple[int, int], ...] = ()
        self.pool = pool
        self._client = client
        self._slot_bytes = slot_bytes
        self._slots = max(1, capacity_bytes // slot_bytes)
        self._state = threading.Condition()
        self._free = list(range(self._slots))
        self._memory = RegisteredMemory(client, self._slots * slot_bytes)

    def enlarge(self, slot_bytes: int, deadline: float) -> None:
        """Make room for pages of `slot_bytes`: as many slots as fit into the memory so far, at least one. Blocks while
        a slot is taken; raises StoreError if one still is at the deadline, or without memory."""
        with self._state:
            if slot_bytes <= self._slot_bytes:
                return
            if not self.clock.wait_for(self._state, lambda: len(self._free) == self._slots, deadline):
                raise StoreError(ErrorKind.NO_BUFFER)
            slots = max(1, self._memory.size // slot_bytes)
            if slots * slot_bytes > self._memory.size:
                try:
                    larger = RegisteredMemory(self._client, slots * slot_bytes)
                except BackendError as error:
                    raise StoreError(ErrorKind.NO_BUFFER, str(error)) from error
                self._memory.free()
                self._memory = larger
            self._slot_bytes, self._slots, self._free = slot_bytes, slots, list(range(slots))

    @contextlib.contextmanager
    def path(self, pages: Sequence[Sequence[memoryview]], deadline: float) -> Iterator[BufferPath]:
        """Choose a path for the first pages, at least one. Blocks while all bounce buffers are taken; raises StoreError
        if none is free by the deadline."""
        addresses = [self._addresses(page) for page in pages]
        staged = [position for position, places in enumerate(addresses) if None in places]
        slots: list[int] = []
        count = len(pages)
        if staged:
            slots = self.take(len(staged), deadline)
            if not slots:
                raise StoreError(ErrorKind.NO_BUFFER)
            if len(slots) < len(staged):
                count = staged[len(slots)]
        path = BufferPath(pages[:count], addresses[:count], slots, self)
        try:
            yield path
        finally:
            if not path.is_abandoned:
                self.give_back(slots)

    def _addresses(self, page: Sequence[memoryview]) -> list[int | None]:
        """Return the address of each registered buffer, None for buffers to copy. Unless nearly all bytes of the page
        are registered, all are None."""
        if self.slow or not self.registered:
            return [None] * len(page)
        places: list[int | None] = []
        loose = 0  # bytes that must be copied
        for buffer in page:
            address = address_of(buffer) if buffer.nbytes else 0
            for start, end in self.registered:
                if start <= address and address + buffer.nbytes <= end:
                    places.append(address)
                    break
            else:
                loose += buffer.nbytes
                places.append(None)
        return places if loose < _LOOSE_BYTES_MAX else [None] * len(page)

    def take(self, count_max: int, deadline: float) -> list[int]:
        """Take one to `count_max` slots; none if none is free by the deadline. Blocks only while all are taken."""
        with self._state:
            self.clock.wait_for(self._state, lambda: bool(self._free), deadline)
            taken, self._free = self._free[:count_max], self._free[count_max:]
            return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Release taken slots."""
        with self._state:
            self._free += slots
            self._state.notify_all()

    def slot(self, number: int) -> tuple[int, memoryview]:
        """Return the address and the bytes of a slot."""
        start = number * self._slot_bytes
        return self._memory.address + start, self._memory.memory[start : start + self._slot_bytes]

    def free(self) -> None:
        """Return the memory to the system. REQUIRES: all slots are free, and no view is used."""
        self._memory.free()

    def check(self) -> None:
        """Raise InvariantError unless all slots are free, each once. REQUIRES: no call is in flight."""
        with self._state:
            if sorted(self._free) != list(range(self._slots)):
                raise InvariantError("mooncake store: bounce buffers are lost or free twice")


class BufferPath:
    """The path of some pages, each a list of buffers: the memory that the library reads or writes.

    `addresses` and `sizes` have a list per page. A page that goes through a slot has one piece. A page in registered
    memory has one piece per buffer; only its small buffers, such as a header, go through the slot. `is_staged` is True
    if all pages go through slots. An abandoned call releases the slots when it ends.
    """

    def __init__(
        self, pages: Sequence[Sequence[memoryview]], addresses: Sequence[Sequence[int | None]], slots: list[int],
        selector: PathSelector,
    ) -> None:
        self.addresses: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self._slots = slots
        self._selector = selector
        self.is_abandoned = False
        self.is_staged = all(one is None for page in addresses for one in page)
        # Per page: the buffers to copy, each with its part of a bounce buffer.
        self._copies: list[list[tuple[memoryview, memoryview]]] = []
        free = iter(slots)
        for buffers, places in zip(pages, addresses, strict=True):
            self._add(buffers, places, selector.slot(next(free)) if None in places else (0, memoryview(b"")))

    def __len__(self) -> int:
        return len(self.addresses)

    def _add(self, buffers: Sequence[memoryview], places: Sequence[int | None], slot: tuple[int, memoryview]) -> None:
        start, view = slot
        copied = end = 0
        copies: list[tuple[memoryview, memoryview]] = []
        pieces: list[tuple[int, int]] = []
        for buffer, place in zip(buffers, places, strict=True):
            size = buffer.nbytes
            end += size
            if place is None:
                copies.append((buffer, view[copied : copied + size]))
                pieces.append((start + copied, size))
                copied += size
            else:
                pieces.append((place, size))
        if copied == end:  # the whole page is in the slot, in one piece
            pieces = [(start, end)]
        self._copies.append(copies)
        self.addresses.append([address for address, size in pieces if size])
        self.sizes.append([size for _, size in pieces if size])

    def run(self, call: Callable[[], list[int]], deadline: float) -> list[int] | None:
        """Make a library call and return its result, or None if it was abandoned; the path is then spent. Blocks until
        the library returns, even past the deadline, unless all pages are in bounce buffers. Raises StoreError."""
        if not self.is_staged:
            return call()
        try:
            result = self._selector.pool.call(
                call, deadline + GRACE_S, late=lambda late: self._selector.give_back(self._slots)
            )
        except NoThread:
            raise StoreError(ErrorKind.NO_THREAD) from None
        self.is_abandoned = result is None
        return result

    def load(self) -> None:
        """Copy the buffers into the bounce buffers."""
        for buffer, staged in itertools.chain.from_iterable(self._copies):
            staged[:] = buffer

    def fetch(self, index: int, size: int) -> None:
        """Copy the `size` bytes that the library has read for page `index` from the bounce buffer to its buffers."""
        in_one_piece = len(self.sizes[index]) == 1  # such a page may be shorter than its buffers
        for buffer, staged in self._copies[index]:
            count = max(0, min(size, buffer.nbytes)) if in_one_piece else buffer.nbytes
            buffer[:count] = staged[:count]
            size -= count
