"""The S3 driver: one object per page, in any store with an S3 API.

Names of objects are `<prefix><namespace>/<first two digits of the key>/<key>`, digests in lower-case hexadecimal. Keys
are hashes, so pages spread evenly over the 256 prefixes of a namespace, by which stores distribute load. A namespace is
one prefix, so it can be listed, purged and expired separately.

The pages of a batch move in parallel, each by one request on its own connection. Requests are not retried here. A
bucket has no capacity limit and does not know chains: limit it with a lifecycle rule (docs/backends/s3.md) or a
CapacityLimit.

Locking design: the threads of a SupervisedPool and the caller move the pages. One thread moves each page and records
its outcome in the `PageReads` or `PageWrites` of the call, or in its slot of a list. Each request ends by its deadline,
so `run` returns soon after it, and then no thread uses a page's buffer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.s3_storage import S3StorageOptions
from ...errors import BackendUnavailable
from ...frame import FrameCodec
from ...supervised import SupervisedPool
from ..base import StoredPage, Usage
from ..driver import Answer
from ..errors import ErrorKind, StoreError
from ..http import PIECE_BYTES
from ..pages import PageReads, PageWrites
from ..prefix import search_prefix
from .access import open_access
from .client import ObjectInfo, S3Client
from .replies import LISTED_MAX

# The time limit for counting a namespace, which takes one request per thousand pages.
_USAGE_S = 60.0
_NAMESPACE_DIGITS = 64
_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})")
# RFC 9110, 8.8.3, but without the non-ASCII bytes that it allows in a tag.
_ENTITY_TAG = re.compile(r'(?:W/)?"[!#-~]*"')
# Advice for the errors that an operator can fix.
_ADVICE: dict[str, str] = {
    ErrorKind.DNS: "the host name cannot be resolved; check endpoint_url and proxy",
    ErrorKind.CONNECTION_REFUSED: "nothing listens at that address; check endpoint_url and proxy",
    ErrorKind.TIMEOUT: "no answer came in time; check endpoint_url and the network",
    ErrorKind.UNREACHABLE: "check endpoint_url, proxy and the network",
    ErrorKind.TLS: "the TLS handshake failed; check endpoint_url and ca_file",
    ErrorKind.CERTIFICATE_EXPIRED: "the certificate of the server has expired or is not valid yet; renew it, or set "
    "the clock",
    ErrorKind.CONNECTION_LOST: "it closed the connection; check https:// against http:// in endpoint_url, and proxy",
    ErrorKind.BAD_REQUEST: "it does not accept the request; check endpoint_url, its path, and the name of the bucket",
    ErrorKind.PROTOCOL: "the reply is not from an S3 store; check endpoint_url",
    ErrorKind.NO_BUCKET: "create the bucket, or correct its name",
    ErrorKind.WRONG_CREDENTIALS: "the credentials are wrong, unknown or expired; check them",
    ErrorKind.ACCESS_DENIED: "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject, or "
    "s3express:CreateSession for a directory bucket",
    ErrorKind.CLOCK_SKEW: "set the clock of this machine",
    ErrorKind.WRONG_REGION: "set region to the bucket's region",
}


def object_name(prefix: str, namespace: bytes, key: bytes) -> str:
    """Return the name of a page's object."""
    digits = key.hex()
    return f"{prefix}{namespace.hex()}/{digits[:2]}/{digits}"


def parse_name(prefix: str, name: str) -> tuple[bytes, bytes] | None:
    """Return namespace and key of the page with that object name; None if it is not the name of a page."""
    match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return None if match is None else (bytes.fromhex(match[1]), bytes.fromhex(match[3]))


class S3Driver:
    """Pages in a bucket. Size and entity tag tell an object from every other one. See the module's docstring;
    `Driver` documents the functions.

    The constructor blocks for the search for credentials and one request, at most for `options.open_timeout`. It raises
    BackendUnavailable if one does not end by then or the bucket cannot be listed, ConfigError if credentials or boto3
    are missing. Open it after a fork, not before.
    """

    def __init__(self, codec: FrameCodec | None, options: S3StorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._measured = "" if codec is None else codec.namespace.hex()
        self.options = instance("options", options, S3StorageOptions)
        self._prefix = options.prefix
        self._name = functools.partial(object_name, options.prefix)
        self._is_conditional = True
        deadline = clock() + options.open_timeout
        access = open_access(options, deadline, clock)
        self._is_directory = access.is_directory
        self._client = S3Client(access)
        try:
            self._client.list(options.prefix, None, 1, deadline=deadline)
        except StoreError as error:
            self._client.close()
            where = f"s3 store: bucket {options.bucket!r} at {options.endpoint_url or 'AWS'}"
            advice = _ADVICE.get(error.kind, "try again when the store works")
            raise BackendUnavailable(f"{where}: {error}; {advice}") from error
        # No `on_error`: the call itself counts a page that a bug leaves without an outcome.
        self._pool = SupervisedPool[Any]("s3", options.connections - 1, clock=clock)

    find_prefix = search_prefix  # see FindsPrefixes

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Driver. One request per key, all in parallel."""
        names = [self._name(namespace, key) for key in keys]
        return self._each(len(keys), lambda at: self._client.head(names[at], deadline=deadline) is not None)

    def _each(self, count: int, ask: Callable[[int], bool]) -> list[Answer]:
        """Return the answer of `ask` for each position, or the kind of its error. All in parallel."""
        answers: list[Answer] = [ErrorKind.INTERNAL] * count

        def one(position: int) -> None:
            try:
                answers[position] = ask(position)
            except StoreError as error:
                answers[position] = error.kind

        self._pool.run(count, one)
        return answers

    def read(self, pages: PageReads[ObjectInfo]) -> None:
        """See Driver. One request per page. S3 does not track recency."""
        # A page that arrives in one piece is still in the processor's cache when it is complete.
        is_hashed_in_pieces = pages.codec.frame_bytes > PIECE_BYTES

        def read_one(position: int) -> None:
            arrived = pages.stream() if is_hashed_in_pieces else None
            try:
                found = self._client.get(
                    self._name(pages.codec.namespace, pages.keys[position]),
                    lambda size: pages.buffers(position, size) if pages.fits(size) else [],
                    arrived, deadline=pages.deadline,
                )
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
                name = self._name(pages.codec.namespace, pages.keys[position])
                try:
                    is_new = self._put_new(name, pages.sealed(position), deadline=pages.deadline)
                except StoreError as error:
                    (pages.reject if error.kind is ErrorKind.NO_SPACE else pages.fail)(position, error.kind)
                else:
                    (pages.stored if is_new else pages.present)(position)

        self._pool.run(len(pages), write_one)

    def _put_new(self, name: str, body: Sequence[memoryview], *, deadline: float) -> bool:
        """Store an object unless it exists; return False if it exists. If the server does not support conditional
        writes, look it up first; then two writers at the same moment may both store theirs."""
        if self._is_conditional:
            try:
                return self._client.put(name, body, if_absent=True, deadline=deadline)
            except StoreError as error:
                if error.kind not in (ErrorKind.UNSUPPORTED, ErrorKind.BAD_REQUEST):
                    raise
        if self._client.head(name, deadline=deadline) is not None:
            return False
        self._client.put(name, body, if_absent=False, deadline=deadline)
        # The server rejected the condition: the same page was stored without it.
        self._is_conditional = False
        return True

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[ObjectInfo] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. Looks each page up first, because removals do not report how many pages existed. With `found`,
        two requests per page; the server rejects the second one if the object's entity tag has changed."""
        if found is not None:
            answers = self._each(
                len(keys), lambda at: self._remove_same(self._name(namespace, keys[at]), found[at], deadline=deadline)
            )
            removed, kinds = answers.count(True), list[str]()
        else:
            answers = self.find(namespace, keys, deadline)
            stored = [key for key, answer in zip(keys, answers, strict=True) if answer is True]
            removed, kinds = self.remove_listed(namespace, stored, deadline)
        return removed, [*(answer for answer in answers if isinstance(answer, str)), *kinds]

    def _remove_same(self, name: str, found: ObjectInfo, *, deadline: float) -> bool:
        """Remove an object if it is still the `found` one; return False if it is not. It is looked up first, because a
        gateway may have answered the read, and some servers ignore the condition of a removal. A tag that is not a
        valid entity tag is only compared here, and not sent."""
        if self._client.head(name, deadline=deadline) != found:
            return False
        try:
            if _ENTITY_TAG.fullmatch(found.etag):
                return self._client.remove(name, found.etag, deadline=deadline)
        except StoreError as error:
            if error.kind not in (ErrorKind.UNSUPPORTED, ErrorKind.BAD_REQUEST):
                raise
        return self._client.remove(name, "", deadline=deadline)

    def remove_listed(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, list[str]]:
        """See RemovesListed. One request per thousand pages."""
        kinds: list[str] = []
        for first in range(0, len(keys), LISTED_MAX):
            some = [self._name(namespace, key) for key in keys[first : first + LISTED_MAX]]
            found = self._client.remove_many(some, deadline=deadline)
            if len(found) > len(some):
                raise StoreError(ErrorKind.PROTOCOL, f"{len(found)} of {len(some)} objects were not removed")
            kinds += found
        return len(keys) - len(kinds), kinds

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. One request per thousand pages, made when the iterator reaches them. `used_s` is the time when a
        page was stored. A listing that repeats a token is an error."""
        listed = f"{namespace}/" if len(namespace) == _NAMESPACE_DIGITS else namespace
        if self._is_directory and len(namespace) < _NAMESPACE_DIGITS:
            listed = ""  # directory buckets accept only prefixes that end with a slash
        token: str | None = None
        seen: set[int] = set()
        while True:
            listing = self._client.list(self._prefix + listed, token, LISTED_MAX, deadline=deadline)
            for entry in listing.objects:
                ids = parse_name(self._prefix, entry.name)
                if ids is not None and ids[0].hex().startswith(namespace):
                    yield StoredPage(*ids, entry.size_bytes, entry.modified_s, stored_s=entry.modified_s)
            token = listing.next_token
            if token is None:
                return
            if hash(token) in seen:
                raise StoreError(ErrorKind.PROTOCOL, "the listing repeats an earlier token, so it would never end")
            seen.add(hash(token))  # a token may be long

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, ObjectInfo | None] | None:
        name, is_whole = self._name(page.namespace, page.key), page.bytes <= bytes_max
        answer = self._client.get_start(name, bytes_max, is_whole=is_whole, deadline=deadline)
        if answer is None:
            return None
        data, tag = answer
        return data, ObjectInfo(len(data) if is_whole else page.bytes, tag) if tag else None

    def measure(self) -> Usage:
        """See Driver. Lists only the pages of the engine's own namespace."""
        pages = size_bytes = 0
        for page in self.pages(self._measured, self._clock() + _USAGE_S):
            pages += 1
            size_bytes += page.bytes
        return Usage(pages, size_bytes, None)

    def explanation(self, kind: str) -> str:
        return _ADVICE.get(kind, "")

    def close(self) -> None:
        self._pool.close()
        self._client.close()
