"""The operator's view of a store: all namespaces, pages as sealed bytes, without a codec.

`hicache ls`, `stat`, `verify`, `purge`, `trim` and `copy` use it, and tests, to check the stored bytes of a backend.
Sealed pages are the same bytes in every store, so they can be copied from one to another. Engines do not use this
module.

All methods block without a limit, and raise BackendUnavailable if the store is not usable. A raw store belongs to one
thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Namespace and key.
PageId: TypeAlias = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One stored object at a page's location; its content was not checked.

    `namespace` and `key` are 32 raw bytes; a shorter key means an object at the location of all pages whose keys begin
    with it. `used_s` is the Unix time of the last use, or of the write if the store does not record uses, or None.
    `identity` distinguishes the object from a later one at its location; None if the store cannot. `damage` is the
    reason why the object cannot be a page, if the listing shows one.
    """

    namespace: bytes
    key: bytes
    bytes: int
    used_s: float | None
    identity: Hashable = None
    damage: str | None = None


class RawStore(ABC):
    """All pages of one store. See the module's docstring."""

    @abstractmethod
    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """Yield every page whose namespace digest starts with `namespace` (lower-case hexadecimal), by namespace if the
        store can list in that order. Changes nothing. Pages stored or removed at the same time may or may not be
        listed."""

    @abstractmethod
    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """Return the first `bytes_max` bytes of a page as stored, unverified; None if it is missing. An object that is
        not a sequence of bytes has zero bytes. Raises PageUnreadable if only this page cannot be read."""

    @abstractmethod
    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """Store `data`, whole or not at all, as that page; return False if it already exists or the store is full.

        Does not verify: the caller has checked `data`, which comes from another store. `parent` is the key of the page
        before it, from its header.
        """

    @abstractmethod
    def remove(self, pages: Sequence[StoredPage]) -> int:
        """Remove pages; return how many existed. A page with an `identity` stays if another object has replaced it."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""
