"""A Mooncake store as its operator sees it: the master lists it, a client without a segment reads and writes it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence

from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendUnavailable
from ...units import MIB
from ..raw import RawStore, StoredPage
from . import codes
from .admin import Admin, admin_address
from .batches import FULL_TRIES, FULL_WAIT_S
from .buffers import RegisteredMemory
from .client import join_store
from .session import remove_unleased

# Pages removed by one request.
_REMOVE_PAGES = 1000


class MooncakeRawStore(RawStore):
    """See RawStore. A listing holds all keys of the master in memory, about 140 bytes per page. Raises as
    MooncakeDriver does."""

    def __init__(self, options: MooncakeStorageOptions) -> None:
        self._prefix = options.prefix
        self._name = re.compile(re.escape(options.prefix) + "([0-9a-f]{64})/([0-9a-f]{64})")
        self._admin = Admin(admin_address(options))
        # It moves pages itself, not through a daemon, and adds no segment: pages in it would be lost on `close`.
        taking_part = options.model_copy(update={"daemon": None, "segment": 0})
        self._client, self._pool = join_store(taking_part, "mooncake-raw")
        self._room: RegisteredMemory | None = None  # allocated and enlarged when needed
        self._closed = False

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. `used_s` is None, because the master does not report it."""
        found = {key: match for key in sorted(self._admin.all_keys()) if (match := self._name.fullmatch(key))}
        names = [name for name, match in found.items() if match[1].startswith(namespace)]
        for name, size in self._admin.sizes(names):
            space, key = found[name].groups()
            yield StoredPage(bytes.fromhex(space), bytes.fromhex(key), size, None)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore."""
        size = min(bytes_max, page.bytes)
        if not size:
            return b""
        room = self._reserve(size)
        code = self._client.get_start(self._name_of(page), room.address, size)[0]
        if code in codes.MISSES or code == codes.BAD_PARAMETER:  # removed, or replaced by a shorter page
            return None
        self._require(code)
        return bytes(room.memory[:size])

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. If the store is full, waits up to half a second for it to evict pages. Does not store `parent`:
        the header in `data` has it."""
        name = self._name_of(page)
        exists = self._client.exist([name])[0]
        if exists:
            self._require(exists)
            return False
        room = self._reserve(len(data))
        room.memory[: len(data)] = data
        for _ in range(FULL_TRIES):
            code = self._client.put([name], [[room.address]], [[len(data)]])[0]
            if code != codes.NO_ROOM:
                self._require(code)
                return True
            time.sleep(FULL_WAIT_S)
        return False

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. Waits until leases expire, at most 30 s per thousand pages; raises BackendUnavailable if some
        remain."""
        removed = 0
        for start in range(0, len(pages), _REMOVE_PAGES):
            names = [self._name_of(page) for page in pages[start : start + _REMOVE_PAGES]]
            count, errors = remove_unleased(names, math.inf, lambda some: self._client.remove(some, force=False))
            removed += count
            if errors:
                raise BackendUnavailable(
                    f"mooncake store: {len(errors)} pages were not removed ({errors[0]}); try again"
                )
        return removed

    def close(self) -> None:
        """See RawStore."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        if self._room is not None:
            self._room.free()
        self._client.leave()

    def _name_of(self, page: StoredPage) -> str:
        return f"{self._prefix}{page.namespace.hex()}/{page.key.hex()}"

    def _reserve(self, size: int) -> RegisteredMemory:
        """Return memory of at least `size` bytes; reuse the current one if it is large enough."""
        if self._room is None or size > self._room.size:
            if self._room is not None:
                self._room.free()
                self._room = None
            self._room = RegisteredMemory(self._client, -(-size // MIB) * MIB)
        return self._room

    def _require(self, code: int) -> None:
        if code < 0:
            raise BackendUnavailable(
                f"mooncake store: a request failed ({codes.kind_of(code)}); check the master and the nodes"
            )
