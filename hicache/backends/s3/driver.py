"""The S3 driver: one object per page, in any store with an S3 API.

The pages of a batch move in parallel, each by one request on its own connection. Requests are not retried here. A
bucket has no capacity limit and does not know chains: limit it with a lifecycle rule (docs/backends/s3.md) or a
CapacityLimit.

Locking design: the threads of a SupervisedPool and the caller move the pages. One thread moves each page and records
its outcome in the `PageReads` or `PageWrites` of the call, or in its slot of a list. Each request ends by its deadline,
so `run` returns soon after it, and then no thread uses a page's buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.s3_storage import S3StorageOptions
from ...frame import FrameCodec
from ...supervised import SupervisedPool
from ..base import StoredPage, Usage
from ..driver import Answer
from ..errors import ErrorKind, StoreError
from ..http import PIECE_BYTES
from ..pages import PageReads, PageWrites
from ..prefix import search_prefix
from .client import ObjectInfo
from .objects import Objects, explanation

# The time limit for counting a namespace, which takes one request per thousand pages.
_USAGE_S = 60.0


class S3Driver:
    """Pages in a bucket. Size and entity tag tell an object from every other one. See the module's docstring;
    `Driver` documents the functions.

    The constructor blocks for the search for credentials and one request, at most for `open_timeout`. It raises
    BackendUnavailable if one does not end by then or the bucket cannot be listed, ConfigError if credentials or boto3
    are missing. Open it after a fork, not before.
    """

    def __init__(
        self, codec: FrameCodec | None, options: S3StorageOptions, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._measured = "" if codec is None else codec.namespace.hex()
        self.options = instance("options", options, S3StorageOptions)
        self._objects = Objects(options, clock)
        # No `on_error`: the call itself counts a page that a bug leaves without an outcome.
        self._pool = SupervisedPool[Any]("s3", options.connections - 1, clock=clock)

    def find_prefix(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        """See FindsPrefixes. Exact for a few keys; for many keys a search, see `prefix`."""
        return search_prefix(self, namespace, keys, deadline)

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Driver. One request per key, all in parallel."""
        found: list[Answer] = [ErrorKind.INTERNAL] * len(keys)

        def ask(position: int) -> None:
            try:
                name = self._objects.name(namespace, keys[position])
                found[position] = self._objects.client.head(name, deadline=deadline) is not None
            except StoreError as error:
                found[position] = error.kind

        self._pool.run(len(keys), ask)
        return found

    def read(self, pages: PageReads[ObjectInfo]) -> None:
        """See Driver. One request per page. S3 does not track recency."""
        # A page that arrives in one piece is still in the processor's cache when it is complete.
        is_hashed_in_pieces = pages.codec.frame_bytes > PIECE_BYTES

        def read_one(position: int) -> None:
            arrived = pages.stream() if is_hashed_in_pieces else None
            try:
                found = self._objects.client.get(
                    self._objects.name(pages.codec.namespace, pages.keys[position]),
                    lambda size: pages.buffers(position, size) if pages.fits(size) else [],
                    arrived, deadline=pages.deadline,
                )  # fmt: skip
            except StoreError as error:
                pages.fail(position, error.kind)
                return
            if found is None:
                pages.miss(position)
            else:
                pages.accept(position, found.size_bytes, found if found.etag else None, arrived)

        self._pool.run(len(pages), read_one)

    def write(self, pages: PageWrites) -> None:
        """See Driver. One request per page; the server rejects it if the page is already stored."""

        def write_one(position: int) -> None:
            if pages.is_full:
                pages.reject(position)
            elif not pages.is_late:
                name = self._objects.name(pages.codec.namespace, pages.keys[position])
                try:
                    is_new = self._objects.put_new(name, pages.sealed(position), deadline=pages.deadline)
                except StoreError as error:
                    (pages.reject if error.kind is ErrorKind.NO_SPACE else pages.fail)(position, error.kind)
                else:
                    (pages.stored if is_new else pages.present)(position)

        self._pool.run(len(pages), write_one)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[ObjectInfo] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. Looks each page up first, because removals do not report how many pages existed. With `found`,
        two requests per page; the server rejects the second one if the object's entity tag has changed."""
        if found is not None:
            return self._remove_same(namespace, keys, found, deadline)
        answers = self.find(namespace, keys, deadline)
        stored = [key for key, answer in zip(keys, answers, strict=True) if answer is True]
        removed, kinds = self.remove_listed(namespace, stored, deadline)
        return removed, [*(answer for answer in answers if isinstance(answer, str)), *kinds]

    def _remove_same(
        self, namespace: bytes, keys: Sequence[bytes], found: Sequence[ObjectInfo], deadline: float
    ) -> tuple[int, Sequence[str]]:
        answers: list[Answer] = [ErrorKind.INTERNAL] * len(keys)

        def remove_one(number: int) -> None:
            try:
                name = self._objects.name(namespace, keys[number])
                answers[number] = self._objects.remove_same(name, found[number], deadline=deadline)
            except StoreError as error:
                answers[number] = error.kind

        self._pool.run(len(keys), remove_one)
        return answers.count(True), [answer for answer in answers if isinstance(answer, str)]

    def remove_listed(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        """See RemovesListed. One request per thousand pages."""
        kinds = self._objects.remove_many([self._objects.name(namespace, key) for key in keys], deadline=deadline)
        return len(keys) - len(kinds), kinds

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. One request per thousand pages, made when the iterator reaches them. `used_s` is the time when a
        page was stored."""
        return self._objects.pages(namespace, deadline=deadline)

    def read_start(
        self, page: StoredPage, bytes_max: int, deadline: float
    ) -> tuple[bytes, ObjectInfo | None] | None:
        """See Inspects."""
        name, is_whole = self._objects.name(page.namespace, page.key), page.bytes <= bytes_max
        answer = self._objects.client.get_start(name, bytes_max, is_whole=is_whole, deadline=deadline)
        if answer is None:
            return None
        data, tag = answer
        return data, ObjectInfo(len(data) if is_whole else page.bytes, tag) if tag else None

    def measure(self) -> Usage:
        """See Driver. Lists only the pages of the engine's own namespace."""
        pages = size_bytes = 0
        for page in self._objects.pages(self._measured, deadline=self._clock() + _USAGE_S):
            pages += 1
            size_bytes += page.bytes
        return Usage(pages, size_bytes, None)

    def explanation(self, kind: str) -> str:
        """See ExplainsErrors."""
        return explanation(kind)

    def close(self) -> None:
        """See Driver."""
        self._pool.close()
        self._objects.close()
