"""The S3 backend: one object per page, in any store that speaks the S3 API.

The pages of a batch move at the same time, each by one request on a connection of its own. Requests are not repeated
here. A store has no limit of its own and does not know chains: bound it with a lifecycle rule (docs/backends/s3.md) or
a LimitedBackend.

Locking design: pages are moved by the threads of a SupervisedPool and by the caller, each page by one of them, which
settles it in the `PageReads` or `PageWrites` of the call or writes its slot of a list. Every request ends by its
deadline, so `run` returns soon after it, and no thread has a buffer of a page then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...arguments import instance
from ...config.s3_storage import S3StorageOptions
from ...frame import FrameCodec
from ...supervised import SupervisedPool
from ..base import Usage
from ..errors import ErrorKind, StoreError
from ..http import PIECE_BYTES
from ..pages import Damaged, PageReads, PageWrites
from ..store import PageStore
from .objects import Objects

# `prefix` asks key by key up to so many keys, all at once, and the answer is exact.
EXACT_KEYS_MAX = 16
# Keys asked for in the first round of a longer batch, ends included. With all or none of them there it is the only one.
FIRST_PROBES = 8
# Keys asked for in each further round, which leaves a fifth of the range.
PROBES = 4
# Counting a namespace takes a request per thousand pages.
_USAGE_S = 60.0


class S3Backend(PageStore[str]):
    """Pages in a bucket, which are told from their successors by their entity tags. See the module's docstring;
    `StorageBackend` says what each verb does. Errors are counted by `ErrorKind`.

    Raises BackendUnavailable from the constructor if the bucket cannot be listed, ConfigError if there are no
    credentials or no boto3; it blocks for one request. Open it after a fork and not before.
    """

    def __init__(self, codec: FrameCodec, options: S3StorageOptions) -> None:
        super().__init__(codec)
        self.options = instance("options", options, S3StorageOptions)
        self._objects = Objects(options)
        # A page that a bug leaves without an outcome is counted with its call.
        self._pool = SupervisedPool[Any]("s3", options.connections - 1)

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. Exact for a few keys; for many it searches the end, see `stored_prefix`."""
        return stored_prefix(len(keys), lambda some: self.find([keys[position] for position in some], deadline))

    def find(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See PageStore. One request per key, all at the same time."""
        found = [False] * len(keys)

        def ask(position: int) -> None:
            found[position] = self._objects.client.head(self._name(keys[position]), deadline=deadline) is not None

        self._do(len(keys), ask)
        return found

    def read(self, pages: PageReads[str]) -> None:
        """See PageStore. One request per page. S3 knows no recency."""
        # A page that comes in one piece is warm when it is whole.
        is_hashed_in_pieces = self.codec.frame_bytes > PIECE_BYTES

        def read_one(position: int) -> None:
            arrived = pages.stream() if is_hashed_in_pieces else None
            try:
                found = self._objects.client.get(
                    self._name(pages.keys[position]),
                    lambda size: pages.buffers(position, size) if pages.fits(size) else [],
                    arrived, deadline=pages.deadline,
                )  # fmt: skip
            except StoreError as error:
                pages.fail(position, error.kind)
                return
            if found is None:
                pages.miss(position)
            else:
                pages.accept(position, found.size_bytes, found.etag, arrived)

        self._pool.run(len(pages), read_one)

    def remove_damaged(self, damaged: Sequence[Damaged[str]], deadline: float) -> None:
        """See PageStore. One request per page, which the server refuses if the object has another entity tag."""

        def remove_one(number: int) -> None:
            one = damaged[number]
            self._objects.remove_damaged(self._name(one.key), one.found, deadline=deadline)

        self._do(len(damaged), remove_one)

    def write(self, pages: PageWrites) -> None:
        """See PageStore. One request per page, which the server refuses if the page is there."""

        def write_one(position: int) -> None:
            if pages.is_full:
                pages.reject(position)
            elif not pages.is_late:
                name = self._name(pages.keys[position])
                try:
                    is_new = self._objects.put_new(name, pages.sealed(position), deadline=pages.deadline)
                except StoreError as error:
                    (pages.reject if error.kind is ErrorKind.NO_SPACE else pages.fail)(position, error.kind)
                else:
                    (pages.stored if is_new else pages.present)(position)

        self._pool.run(len(pages), write_one)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. Asks for each page first: removing does not tell how many pages were there."""
        found = self.find(keys, deadline)
        return self.remove_listed([key for key, there in zip(keys, found, strict=True) if there], deadline)

    def remove_listed(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. One request per thousand pages."""
        kinds = self._objects.remove_many([self._name(key) for key in keys], deadline=deadline)
        self.count(*kinds)
        return len(keys) - len(kinds)

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore. One request per thousand pages, made when the first of them is asked for."""
        return (page.key for page in self._objects.pages(self.codec.namespace.hex(), deadline=deadline))

    def measure(self) -> Usage:
        """See PageStore. Lists the pages of this namespace."""
        pages = size_bytes = 0
        for page in self._objects.pages(self.codec.namespace.hex(), deadline=time.monotonic() + _USAGE_S):
            pages += 1
            size_bytes += page.bytes
        return Usage(pages, size_bytes, None)

    def shut(self) -> None:
        """See PageStore."""
        self._pool.close()
        self._objects.close()

    def _name(self, key: bytes) -> str:
        return self._objects.name(self.codec.namespace, key)

    def _do(self, count: int, work: Callable[[int], None]) -> None:
        """Do `work(0) .. work(count - 1)` at the same time, and count those that fail."""
        errors: list[str] = [ErrorKind.INTERNAL] * count

        def do_one(number: int) -> None:
            try:
                work(number)
            except StoreError as error:
                errors[number] = error.kind
            else:
                errors[number] = ""

        self._pool.run(count, do_one)
        self.count(*filter(None, errors))


def stored_prefix(count: int, ask: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """The length of the prefix of `count` keys that is stored. `ask` says of some positions whether each is there.

    Pages of a chain are written head first and evicted tail first, so the stored ones are nearly always a prefix, and
    its end can be searched for. Each round asks for a few keys at once, because a round costs one round trip however
    many they are.

    Exact up to EXACT_KEYS_MAX keys. Beyond that exact if no key is missing in front of one that is stored; where that
    does not hold, a hole between the keys that were asked for is not seen.
    """
    if count <= EXACT_KEYS_MAX:
        found = ask(range(count))
        return next((position for position, there in enumerate(found) if not there), count)
    low, high = 0, count  # all asked for below `low` are there, `high` is not, or the end
    probes = _spread(-1, count, FIRST_PROBES, ends=True)
    while probes:
        for position, there in zip(probes, ask(probes), strict=True):
            if not there:
                high = position
                break
            low = position + 1
        probes = _spread(low - 1, high, PROBES, ends=False)
    return high


def _spread(low: int, high: int, count: int, *, ends: bool) -> list[int]:
    """Up to `count` positions evenly between `low` and `high`, which are left out; with `ends` the outermost ones."""
    first, last = low + 1, high - 1
    if last - first + 1 <= count:
        return list(range(first, last + 1))
    if ends:
        return [first + (last - first) * i // (count - 1) for i in range(count)]
    return [low + (high - low) * i // (count + 1) for i in range(1, count + 1)]
