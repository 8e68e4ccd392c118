"""A Redis store as its operator sees it: every page under the key prefix, of all namespaces.

Listing uses SCAN, which costs the server time for each key that it holds, in steps of about a millisecond. A page that
exists during the whole listing is listed once. Pages are listed and removed on the primaries. Inspection does not
refresh recency, except on servers before 7.2, where listing or reading a page counts as a use.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

from ...config.redis_storage import RedisStorageOptions
from ..errors import ErrorKind, StoreError
from ..raw import RawStore, StoredPage
from .channel import Channel, Reply, command
from .driver import open_servers
from .errors import ErrorReply, unavailable
from .pool import Purpose
from .routing import Server
from .usage import listed, number

# The time limit of each step: an operator's command has time, but must not hang with a hanging server.
_WORK_S = 60.0
# The most bytes read of a value: more than any page of an engine has.
_READ_MAX_BYTES = 64 << 20


class RedisRawStore(RawStore):
    """See RawStore. The constructor blocks and raises as RedisDriver's does."""

    def __init__(self, options: RedisStorageOptions) -> None:
        self._options = options
        self._prefix = options.key_prefix.encode()
        self._access, self._pools, self._router = open_servers(options)

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. Lists server by server; namespaces are in no order."""
        with self._unavailable():
            for shard in self._router.routes(_by()).shards:
                pool, seen = self._pools.of(shard.primary, Purpose.INSPECTION), set[bytes]()
                for found in listed(pool, self._prefix, namespace, _by):
                    fresh = {name: page for name, page in found.items() if name not in seen}
                    seen.update(fresh)
                    if fresh:
                        yield from pool.run(functools.partial(_look, fresh, deadline := _by()), deadline)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore. A value that is not a string has no bytes. REQUIRES: `bytes_max` is not 0."""
        name = self._name(page)
        size = min(bytes_max, _READ_MAX_BYTES)
        found = self._call(name, b"GETRANGE", b"0", b"%d" % (size - 1), expected=ErrorKind.WRONG_TYPE, value_max=size)
        if isinstance(found, ErrorReply):
            return b""
        # A missing key also has an empty range.
        there = found or self._call(name, b"EXISTS")
        return found if there and isinstance(found, bytes) else None

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. Redis stores no chains, so `parent` is only in the page's header."""
        name, ttl_s = self._name(page), self._options.ttl
        more = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        return self._call(name, b"SET", data, b"NX", *more, expected=ErrorKind.NO_SPACE) == b"OK"

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. One round trip per server."""
        deadline = _by()
        names = [self._name(page) for page in pages]
        removed = 0
        with self._unavailable():
            groups = self._router.by_server(range(len(names)), names, to_read=False, deadline=deadline)
            for server, positions in groups.items():
                requests = [command(b"UNLINK", names[position]) for position in positions]
                pool = self._pools.of(self._known(server).address, Purpose.INSPECTION)
                for line in pool.run(functools.partial(_ask, requests, deadline), deadline):
                    if line.startswith(b"-"):
                        raise ErrorReply(line[1:]).failure
                    removed += line == b":1"
        return removed

    def close(self) -> None:
        """See RawStore."""
        self._pools.close()

    def _name(self, page: StoredPage) -> bytes:
        return self._prefix + f"{page.namespace.hex()}:{page.key.hex()}".encode()

    def _call(
        self, name: bytes, verb: bytes, *more: bytes, expected: ErrorKind | None = None, value_max: int = 0
    ) -> Reply:
        """Send one request about the page under `name` and return its reply, a value of at most `value_max` bytes. An
        error reply is returned if its kind is `expected`, else raised as BackendUnavailable."""
        deadline = _by()
        with self._unavailable():
            (server,) = self._router.by_server([0], [name], to_read=False, deadline=deadline)
            pool = self._pools.of(self._known(server).address, Purpose.INSPECTION)
            reply = pool.run(
                lambda channel: channel.call(verb, name, *more, deadline=deadline, bytes_max=value_max), deadline
            )
            if isinstance(reply, ErrorReply) and reply.kind is not expected:
                raise reply.failure
        return reply

    @staticmethod
    def _known(server: Server | None) -> Server:
        if server is None:
            raise StoreError(ErrorKind.CLUSTER_DOWN, "no node has that slot")
        return server

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except StoreError as failure:
            self._router.note(failure.kind, None)
            raise unavailable(failure, self._access.where) from failure


def _look(
    names: Mapping[bytes, tuple[bytes, bytes]], deadline: float, channel: Channel
) -> list[StoredPage]:
    """Return the pages in `names` (as `listed` yields them) that still exist, with length and time of last use."""
    requests = [  # the idle time comes first: on old servers, reading the length counts as a use
        part
        for name in names
        for part in (command(b"OBJECT", b"IDLETIME", name), command(b"STRLEN", name), command(b"EXISTS", name))
    ]
    lines = _ask(requests, deadline, channel)
    now_s = time.time()
    pages = []
    for (namespace, key), idle, size, there in zip(names.values(), lines[::3], lines[1::3], lines[2::3], strict=True):
        if number(there):
            # A value that is not a string still takes a page's place. Under an LFU policy there are no idle times.
            length = number(size) or 0
            used_s = None if idle.startswith((b"-", b"$-1")) else now_s - (number(idle) or 0)
            pages.append(StoredPage(namespace, key, length, used_s))
    return pages


def _by() -> float:
    """Return the deadline of a step that begins now."""
    return time.monotonic() + _WORK_S


def _ask(requests: Sequence[bytes], deadline: float, channel: Channel) -> list[bytes]:
    """Send requests with one-line replies, and return the replies."""
    channel.send([b"".join(requests)], len(requests), deadline)
    return channel.read_lines(len(requests), deadline)
