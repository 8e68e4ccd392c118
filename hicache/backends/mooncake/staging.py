"""Memory between frames and the network, for frames that are not registered: a bounded number of slots.

Locking design: `_state` guards `_free`. The bytes of a slot belong to whoever took it, until they are given back.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from typing import Any

from ...errors import BackendError, InvariantError
from .client import Client


class RegisteredRoom:
    """`size` bytes of memory that pages can be moved from and to, by a daemon too. Raises BackendError if there is no
    such memory. Belongs to whoever made it."""

    def __init__(self, client: Client, size: int) -> None:
        self._client = client
        self._allocator: Any = client.allocator()
        self.size = size
        self.address = int(self._allocator.alloc(size))
        if not self.address:
            raise BackendError(f"mooncake store: the system has no {size} bytes of shared memory for staging")
        try:
            client.register(self.address, size)
        except BackendError:
            self._allocator.free(self.address)
            raise
        self.memory = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")

    def free(self) -> None:
        """Give it back to the system. REQUIRES: no call uses it, and no view of it is used."""
        self._client.unregister(self.address, self.size)
        self.memory.release()
        self._allocator.free(self.address)


class Staging:
    """As many slots of `slot_bytes` as fit into `capacity_bytes`, at least one, in registered memory.

    Invariant: each slot is either free or taken by one call. Raises BackendError if there is no such memory.
    """

    def __init__(self, client: Client, slot_bytes: int, capacity_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._slots = max(1, capacity_bytes // slot_bytes)
        self._state = threading.Condition()
        self._free = list(range(self._slots))
        self._room = RegisteredRoom(client, self._slots * slot_bytes)

    def take(self, count_max: int, deadline: float) -> list[int]:
        """One to `count_max` slots; none if there is none free by the deadline. Blocks only while there is none."""
        with self._state:
            wait_s = max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
            self._state.wait_for(lambda: self._free, wait_s)
            taken, self._free = self._free[:count_max], self._free[count_max:]
            return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that were taken."""
        with self._state:
            self._free += slots
            self._state.notify_all()

    def address(self, slot: int) -> int:
        """Where a slot is."""
        return self._room.address + slot * self._slot_bytes

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._room.memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def free(self) -> None:
        """Give the memory back to the system. REQUIRES: all slots are free, no view is used."""
        self._room.free()

    def check(self) -> None:
        """Raise InvariantError unless all slots are free, each once. REQUIRES: no call is under way."""
        with self._state:
            if sorted(self._free) != list(range(self._slots)):
                raise InvariantError("mooncake store: slots of the staging memory are lost or free twice")
