"""Storage that passes every verb to a store: the base of stores with faults of a test."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.base import GetOutcome, SetOutcome, Usage
from hicache.backends.calls import Call
from hicache.backends.storage import Storage, StoreGroup
from hicache.backends.store import Store
from hicache.frame import PageBuffer


class Passing(StoreGroup):
    """See the module's docstring. Owns `inner`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner.codec, None)
        self.inner = inner

    @property
    def stores(self) -> tuple[Store, ...]:
        return self.inner.stores

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        return self.inner.batch_exists(keys, deadline=call.deadline, errors=call.report)

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.batch_has(keys, deadline=call.deadline, errors=call.report)

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        return self.inner.batch_get(keys, pages, deadline=call.deadline, errors=call.report)

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        return self.inner.batch_set(keys, pages, parent=parent, deadline=call.deadline, errors=call.report)

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        return self.inner.batch_touch(keys, deadline=call.deadline, errors=call.report)

    def _delete(self, call: Call, keys: list[bytes]) -> int:
        return self.inner.delete(keys, deadline=call.deadline, errors=call.report)

    def _clear(self, call: Call) -> int:
        return self.inner.clear(deadline=call.deadline, errors=call.report)

    def _measure(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()
