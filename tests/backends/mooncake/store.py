"""Helpers of the Mooncake tests: a master with short leases, and a side door to its store."""

from __future__ import annotations

import mmap
from typing import Any

from hicache.backends.base import SetOutcome
from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.mooncake.client import load_library
from hicache.backends.store import Store
from hicache.config import MooncakeStorageOptions
from hicache.frame import FrameCodec
from hicache.units import MIB
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, Subject, driver_of, full_frames, soon, store_of
from hicache_lab.devservers import MooncakeMaster

# Longer than a read on a busy machine, which would fail after its lease; short, because deletions wait for leases.
LEASE_MS = 500
SEGMENT_BYTES = 64 * MIB
STAGING_BYTES = MIB
_POISON = b"\xee"
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)


def options_for(master: MooncakeMaster, **changes: Any) -> dict[str, Any]:
    """Return options of a backend with a small segment in this process."""
    return {
        "master": master.address, "admin": master.metrics_address, "segment": SEGMENT_BYTES,
        "staging": STAGING_BYTES, "timeout": 1.0, **changes,
    }


def open_backend(master: MooncakeMaster, codec: FrameCodec = CODEC, **changes: Any) -> Store:
    """Open a backend with `options_for(master, **changes)`."""
    return store_of(MooncakeDriver, codec, MooncakeStorageOptions(**options_for(master, **changes)))


def store(
    backend: Store, keys: list[bytes], parent: bytes | None = None, deadline: float | None = None
) -> list[SetOutcome]:
    """Store pages as one chain behind `parent`."""
    frames = full_frames(backend.codec, keys)
    return backend.batch_set(keys, frames, parent=parent, deadline=soon() if deadline is None else deadline)


class SideDoor:
    """The library's own client, without a segment: it reads the store, and writes foreign values into it."""

    def __init__(self, master: MooncakeMaster) -> None:
        self.client: Any = load_library(MooncakeStorageOptions(timeout=1.0)).MooncakeDistributedStore()
        code = self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master.address)
        assert code == 0, code

    def name(self, backend: Store, key: bytes) -> str:
        """Return the name under which `backend` stores the page `key`."""
        return f"{driver_of(backend, MooncakeDriver).options.prefix}{backend.codec.namespace.hex()}/{key.hex()}"

    def store(self, backend: Store) -> Subject:
        """Return `backend` with this side door."""

        def read(key: bytes) -> bytes | None:
            return self.client.get(self.name(backend, key)) or None

        def write(key: bytes, data: bytes) -> None:
            self.client.remove(self.name(backend, key), True)
            assert self.client.put(self.name(backend, key), data) == 0

        return Subject(backend, read, write)

    def clear(self) -> None:
        """Empty the store, despite leases."""
        self.client.remove_all(True)

    def close(self) -> None:
        self.client.close()


class Memory:
    """Adjacent frames in one piece of memory, as in a host pool, with `guard` bytes after the last one."""

    def __init__(self, codec: FrameCodec, count: int) -> None:
        size = codec.frame_bytes
        self._map = mmap.mmap(-1, (count + 1) * size)
        self.whole = memoryview(self._map)[: count * size]
        self.guard = memoryview(self._map)[count * size :]
        self.frames = [self.whole[number * size : (number + 1) * size] for number in range(count)]

    def poison(self) -> None:
        """Fill the memory with bytes that no page has."""
        self.whole[:] = _POISON * len(self.whole)
        self.guard[:] = _POISON * len(self.guard)

    def is_poisoned(self) -> bool:
        """Return True if nothing was written since `poison`."""
        return all(part == _POISON * len(part) for part in (self.whole, self.guard))
