"""A store as its operator sees it: every namespace in it, pages as sealed bytes, and no codec.

This is what `hicache ls`, `stat`, `verify`, `purge`, `trim` and `copy` work with, and the side door through which tests
look at what a backend has really stored. Sealed pages are the same bytes in every store, so they can be carried from
one to another. Nothing here is on an engine's path.

All methods block, for as long as the store takes, and raise BackendUnavailable where it cannot be used. A raw store
belongs to one thread.
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
    """One stored object in a page's place. Nothing but its place says that it is a page.

    `namespace` and `key` are 32 raw bytes; a shorter key stands for an object in the place of all pages whose keys
    begin so. `used_s` is Unix time: of the last use where the store knows it, of the store otherwise, None if it knows
    neither. `identity` tells the object from a later one in its place, None if the store cannot tell. `damage` says why
    the object cannot be a page if the listing alone shows that.
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
        """Every page whose namespace digest starts with `namespace` (lower-case hexadecimal), namespace by namespace
        where the store can list so. Changes nothing. Pages stored or removed meanwhile may or may not be seen."""

    @abstractmethod
    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """The first `bytes_max` bytes of a page as stored, unchecked; None if it is gone. An object that is not a
        sequence of bytes has none. Raises PageUnreadable if only this page cannot be read."""

    @abstractmethod
    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """Store `data`, whole or not at all, as that page; False if one is there already or there is no room.

        Checks nothing: `data` comes from another store, where the caller has looked at it. `parent` is the key of the
        page before it, as its header says.
        """

    @abstractmethod
    def remove(self, pages: Sequence[StoredPage]) -> int:
        """Remove pages; how many were there. A page with an `identity` stays if another object has taken its place."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. May be called twice."""
