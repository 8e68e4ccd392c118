"""The verbs of storage: the operations of every L3 backend on batches of pages.

A batch is a run of consecutive pages of one chain, head first. Keys are 32 raw bytes. A page is a frame, a writable
memoryview of exactly `codec.frame_bytes` bytes of host memory, or a `PageView` of memory that the caller owns; tensors
are not passed. A backend belongs to one namespace and cannot access another. Backends seal pages before they store them
and verify pages that they read, page by page through their codec while the bytes are in the processor's cache, and
remove pages that fail.

Deadlines are times of the stores' clock. After its deadline a verb does not start another page, and reports the
remaining pages as ERROR (a lookup: as not stored). A failure of the store is an outcome, not an exception, and is
counted in `BackendStatistics.errors`, also for lookups; a caller's list `errors` gets the kinds of the errors of its
call. A call that is rejected, such as after `close`, counts one error for each page that it would move, and otherwise
one. Only InvalidInput is raised, for arguments that break this contract, and BackendError by `close`.

One process may open a store several times. Damage that `is_unsupported`, such as a compressed page without zstd, is a
MISS and an error of that class: the page stays for other readers.

Locking design: any threads may call all verbs at the same time, which may block up to the deadline; an engine's
scheduler thread does not call them. `close` waits for the calls in flight; later verbs report ERROR. `_close_lock` lets
a second `close` wait for the first. `_usage` is one reference. `Calls` has its own lock.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..frame import FrameCodec, PageBuffer
from .base import GetOutcome, SetOutcome, Usage
from .calls import Call, Calls, Verb, check_batch, check_keys
from .errors import StoreError

T = TypeVar("T")


class Verbs(ABC):
    """Pages of one namespace. See the module's docstring for the rules of every verb. `hicache.open_storage`
    returns one:

        >>> from hicache import HiCacheConfig, KVGeometry, Namespace, open_storage
        >>> namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
        >>> config = HiCacheConfig.model_validate({"page_size": 16, "storage": {"type": "memory"}})
        >>> store, key, deadline = open_storage(config, namespace), bytes(32), float("inf")
        >>> page = memoryview(bytearray(store.codec.frame_bytes))
        >>> [outcome.name for outcome in store.batch_set([key], [page], parent=None, deadline=deadline)]
        ['STORED']
        >>> store.batch_exists([key, bytes(31) + b"2"], deadline=deadline)
        1
        >>> store.close()

    A verb checks its arguments, and passes a Call with at least one key to the abstract function of its name, which may
    raise StoreError to end the call as if it had been rejected. `calls` admits and counts the calls, or is None for a
    composition, whose parts do.
    """

    def __init__(self, codec: FrameCodec, calls: Calls | None) -> None:
        self.codec = codec
        self._calls = calls
        self._close_lock = threading.Lock()
        self._usage = Usage(0, 0, None)

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float, errors: list[str] | None = None) -> int:
        """Return the length of the longest prefix of `keys` that is stored, up to the first hole.

        A hint: a page may be evicted before `batch_get` reads it. Does not refresh recency.
        """
        check_keys(keys)
        return self._call(Call(Verb.EXISTS, len(keys), 0, deadline, errors), 0, self._exists, keys) if keys else 0

    def batch_has(self, keys: Sequence[bytes], *, deadline: float, errors: list[str] | None = None) -> list[bool]:
        """As `batch_exists`, but return for each of `keys` if it is stored: for engines that look up single pages."""
        check_keys(keys)
        refused = [False] * len(keys)
        return self._call(Call(Verb.EXISTS, len(keys), 0, deadline, errors), refused, self._has, keys) if keys else []

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float, errors: list[str] | None = None
    ) -> list[GetOutcome]:
        """Read pages directly into `pages`, one outcome per key. Refreshes the recency of hits.

        REQUIRES: `len(keys) == len(pages)`; others do not access the pages until the call returns.
        """
        check_batch(self.codec, keys, pages)
        count = len(keys)
        if not count:
            return []
        call = Call(Verb.GET, count, count * self.codec.frame_bytes, deadline, errors)
        return self._call(call, [GetOutcome.ERROR] * count, self._get, keys, pages)

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float,
        errors: list[str] | None = None,
    ) -> list[SetOutcome]:
        """Store pages, one outcome per key. Idempotent; each page becomes visible as a whole or not at all.

        `parent` is the key of the page before `keys[0]`, None at the start of a chain, so that a backend can evict
        tails before heads. Seals the pages. A key that occurs twice is stored once, with the page before its first
        occurrence as its parent. REQUIRES: as `batch_get`, complete payloads, and `parent` is not one of `keys`.
        """
        check_batch(self.codec, keys, pages, parent)
        count = len(keys)
        if not count:
            return []
        call = Call(Verb.SET, count, count * self.codec.frame_bytes, deadline, errors)
        return self._call(call, [SetOutcome.ERROR] * count, self._set, keys, pages, parent)

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float, errors: list[str] | None = None) -> list[bytes]:
        """Count each of `keys` as used now, and return those that are known to be missing, in any order.

        `keys` are pages of any chains, the head of each before its tail. A hint: failures are counted and not retried,
        and their keys are not returned. A store whose eviction does not consider uses returns nothing.
        """
        check_keys(keys)
        if not keys:
            return []
        distinct = list(dict.fromkeys(keys))
        return self._call(Call(Verb.TOUCH, len(distinct), 0, deadline, errors), [], self._touch, distinct)

    def delete(self, keys: Sequence[bytes], *, deadline: float, errors: list[str] | None = None) -> int:
        """Remove pages; return how many were stored. Missing pages are not an error."""
        check_keys(keys)
        if not keys:
            return 0
        distinct = list(dict.fromkeys(keys))
        return self._call(Call(Verb.DELETE, len(distinct), 0, deadline, errors), 0, self._delete, distinct)

    def clear(self, *, deadline: float, errors: list[str] | None = None) -> int:
        """Remove all pages of this namespace; return how many were stored. Blocks: a server lists them first.

        Pages stored at the same time may stay. If pages remain at the deadline, that counts as one error.
        """
        return self._call(Call(Verb.DELETE, 0, 0, deadline, errors), 0, self._clear)

    def usage(self) -> Usage:
        """Return the pages stored by all processes that share the store. May block: a server counts by listing.

        If the store fails, return the last known usage and count an error; after `close`, only return it.
        """
        if self._calls is None:
            return self._measure()
        with self._calls.use() as is_open:
            if is_open:
                try:
                    self._usage = self._measure()
                except StoreError as error:
                    self._calls.count(error.kind)
        return self._usage

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls in flight, then release files, sockets and threads. Idempotent."""

    def _call(self, call: Call, refused: T, work: Callable[..., T], *arguments: object) -> T:
        """Return `work(call, *arguments)`, or `refused` for a rejected call."""
        if self._calls is None:
            return work(call, *arguments)
        answer = refused
        try:
            self._calls.enter(call)
            answer = work(call, *arguments)
        except StoreError as error:
            call.errors += [error.kind] * call.pages
        finally:
            self._calls.leave(call, answer)
        return answer

    @abstractmethod
    def _exists(self, call: Call, keys: Sequence[bytes]) -> int: ...

    @abstractmethod
    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]: ...

    @abstractmethod
    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]: ...

    @abstractmethod
    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]: ...

    @abstractmethod
    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]: ...

    @abstractmethod
    def _delete(self, call: Call, keys: list[bytes]) -> int: ...

    @abstractmethod
    def _clear(self, call: Call) -> int: ...

    @abstractmethod
    def _measure(self) -> Usage: ...
