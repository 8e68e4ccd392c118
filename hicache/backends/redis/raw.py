"""A Redis store as its operator sees it: every page under the key prefix, of all namespaces.

Listing goes by SCAN, which costs a server time for every key it has, in pieces of about a millisecond; a page that is
there all the while is listed once. Pages are listed and removed on the primaries. Looking at them does not count as a
use, but for servers before 7.2, to which a page that was listed or read is one that was used.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import BackendUnavailable
from ..raw import RawStore, StoredPage
from .backend import open_router
from .channel import Channel, Reply, command
from .connect import Connector
from .errors import ErrorReply, Fault, Trouble
from .opening import redis_options
from .options import Endpoint, RedisOptions
from .pool import Pools, Purpose
from .routing import Server
from .usage import number, scan

_SCAN_COUNT = b"1000"
# Steps of SCAN through one server: enough for a thousand million keys, and an end for a server whose cursor has none.
_SCANS_MAX = 1 << 20
# An operator's command has time, but a server that hangs must not hang it: for each piece of work.
_WORK_S = 60.0
# Of a value so much is read at most: more than any page of an engine has.
_READ_MAX_BYTES = 64 << 20
_NAME = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})")


class RedisRawStore(RawStore):
    """See RawStore. The constructor blocks and raises as RedisBackend's does."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._prefix = options.key_prefix.encode()
        connector = Connector(options)
        self._pools = Pools(connector, options.connections)
        try:
            self._router = open_router(options, connector, self._pools)
        except BaseException:
            self._pools.close()
            raise

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. Server by server, in no order of namespaces."""
        pattern = self._prefix + namespace.encode() + b"*"
        with self._unavailable():
            shards = self._router.routes(time.monotonic() + _WORK_S).shards
        for shard in shards:
            seen: set[bytes] = set()
            cursor = b"0"
            for _ in range(_SCANS_MAX):
                cursor, found = self._page_of_scan(shard.primary, cursor, pattern)
                for page in found:
                    name = page.namespace + page.key
                    if name not in seen:
                        seen.add(name)
                        yield page
                if cursor == b"0":
                    break
            else:
                raise Trouble(Fault.PROTOCOL, "SCAN does not end").unavailable(self._options.shown(shard.primary))

    def _page_of_scan(
        self, primary: Endpoint, cursor: bytes, pattern: bytes
    ) -> tuple[bytes, list[StoredPage]]:
        """One step of SCAN and what there is to know about its pages; the cursor is b"0" after the last step."""
        deadline = time.monotonic() + _WORK_S

        def step(channel: Channel) -> tuple[bytes, list[StoredPage]]:
            following, names = scan(channel, cursor, deadline, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
            return following, self._look(channel, names, deadline)

        with self._unavailable():
            return self._pools.of(primary, Purpose.INSPECTION).run(step, deadline)

    def _look(self, channel: Channel, names: Sequence[bytes], deadline: float) -> list[StoredPage]:
        matches = [(name, match) for name in names if (match := _NAME.fullmatch(name.removeprefix(self._prefix)))]
        if not matches:
            return []
        requests = [  # when it was used comes first: to an old server, asking for the length is a use
            part
            for name, _ in matches
            for part in (command(b"OBJECT", b"IDLETIME", name), command(b"STRLEN", name), command(b"EXISTS", name))
        ]
        lines = _ask(requests, deadline, channel)
        now_s = time.time()
        pages = []
        for (_, match), idle, size, there in zip(matches, lines[::3], lines[1::3], lines[2::3], strict=True):
            if number(there):
                # What is no string lies in a page's place all the same; under an LFU policy nobody knows idle times.
                length = number(size) or 0
                used_s = None if idle.startswith((b"-", b"$-1")) else now_s - (number(idle) or 0)
                pages.append(StoredPage(
                    bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode()), length, used_s
                ))  # fmt: skip
        return pages

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore. What is no string has no bytes. REQUIRES: `bytes_max` is not 0."""
        name = self._name(page)
        size = min(bytes_max, _READ_MAX_BYTES)
        found = self._call(name, b"GETRANGE", b"0", b"%d" % (size - 1), expected=Fault.WRONG_TYPE, value_max=size)
        if isinstance(found, ErrorReply):
            return b""
        # What is not there has an empty range, too.
        there = found or self._call(name, b"EXISTS")
        return found if there and isinstance(found, bytes) else None

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. Redis keeps no chains, so `parent` stays where it is: in the header."""
        name, ttl_s = self._name(page), self._options.ttl_s
        more = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        return self._call(name, b"SET", data, b"NX", *more, expected=Fault.OUT_OF_MEMORY) == b"OK"

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. One round trip per server."""
        deadline = time.monotonic() + _WORK_S
        names = [self._name(page) for page in pages]
        removed = 0
        with self._unavailable():
            groups = self._router.by_server(range(len(names)), names, to_read=False, deadline=deadline)
            for server, positions in groups.items():
                requests = [command(b"UNLINK", names[position]) for position in positions]
                pool = self._pools.of(self._known(server).address, Purpose.INSPECTION)
                for line in pool.run(functools.partial(_ask, requests, deadline), deadline):
                    if line.startswith(b"-"):
                        raise ErrorReply(line[1:]).trouble
                    removed += line == b":1"
        return removed

    def close(self) -> None:
        """See RawStore."""
        self._pools.close()

    def _name(self, page: StoredPage) -> bytes:
        return self._prefix + f"{page.namespace.hex()}:{page.key.hex()}".encode()

    def _call(
        self, name: bytes, verb: bytes, *more: bytes, expected: Fault | None = None, value_max: int = 0
    ) -> Reply:
        """The reply to one request about the page under `name`, a value of `value_max` bytes at most; of errors only
        the `expected` one."""
        deadline = time.monotonic() + _WORK_S
        with self._unavailable():
            (server,) = self._router.by_server([0], [name], to_read=False, deadline=deadline)
            pool = self._pools.of(self._known(server).address, Purpose.INSPECTION)
            reply = pool.run(
                lambda channel: channel.call(verb, name, *more, deadline=deadline, bytes_max=value_max), deadline
            )
            if isinstance(reply, ErrorReply) and reply.fault is not expected:
                raise reply.trouble
        return reply

    @staticmethod
    def _known(server: Server | None) -> Server:
        if server is None:
            raise Trouble(Fault.CLUSTER_DOWN, "no node has that slot")
        return server

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except Trouble as trouble:
            self._router.note(trouble.fault, None)
            unavailable: BackendUnavailable = trouble.unavailable(self._options.where)
            raise unavailable from trouble


def _ask(requests: Sequence[bytes], deadline: float, channel: Channel) -> list[bytes]:
    """The replies to requests that have one line each."""
    channel.send([b"".join(requests)], len(requests), deadline)
    return channel.read_lines(len(requests), deadline)


def open_raw(**options: Any) -> RedisRawStore:
    """The store of the options of `redis_options`; raises as that and RedisBackend."""
    return RedisRawStore(redis_options(**options))
