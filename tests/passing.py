"""Storage that passes every verb to a store: the base of stores with faults of a test."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.base import GetOutcome, SetOutcome, Usage
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.frame import PageBuffer


class Passing(Storage):
    """See the module's docstring. Owns `inner`."""

    def __init__(self, inner: Storage) -> None:
        self.codec = inner.codec
        self.inner = inner

    @property
    def stores(self) -> tuple[Store, ...]:
        return self.inner.stores

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        return self.inner.batch_exists(keys, deadline=deadline)

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        return self.inner.batch_has(keys, deadline=deadline)

    def batch_get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float) -> list[GetOutcome]:
        return self.inner.batch_get(keys, pages, deadline=deadline)

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        return self.inner.batch_set(keys, pages, parent=parent, deadline=deadline)

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        return self.inner.batch_touch(keys, deadline=deadline)

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        return self.inner.delete(keys, deadline=deadline)

    def clear(self, *, deadline: float) -> int:
        return self.inner.clear(deadline=deadline)

    def usage(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()
