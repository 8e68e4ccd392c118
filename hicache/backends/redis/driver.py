"""The Redis driver: one string per page, on one server, behind sentinels, or spread over a cluster.

A `read` groups the pages by server. For each server, a few connections pipeline GETs (two pages or 512 KiB
deep), read each value directly into its page and check it while it is in the processor's cache. A `write` first
looks up which pages are stored, then sends the others with SET NX; one gathering send has header and body. A lookup is
one round trip per server. docs/backends/redis.md has the keys, the commands and their cost.

The cost of a full listing grows with all keys on the server, about a millisecond per thousand. So a measurement looks
at only about `SAMPLE_KEYS` keys per server. It is exact for servers with fewer keys, and an estimate beyond: the share
of pages in the sample is applied to all keys. SCAN walks in the order of the keys' hashes, so the sample is fair, with
a relative error of about 1 / sqrt(SAMPLE_KEYS).

Locking design: a call owns its batch and leases connections. `Pools` and `Router` have their own locks; no lock is held
while another is taken or a socket is used. Everything else is set once.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.redis_storage import RedisStorageOptions
from ...errors import ConfigError, InvalidInput
from ...frame import HEADER_BYTES, FrameCodec
from ...supervised import SupervisedPool
from ..base import PageId, StoredPage, Usage
from ..driver import Answer, Incidents
from ..errors import ErrorKind, StoreError
from ..pages import PageReads, PageWrites
from .batches import RedisReads, RedisWrites
from .channel import Channel, Reply, command
from .connect import Connector
from .errors import ADVICE, FULL, ErrorReply, unavailable
from .options import RedisAccess, open_access
from .pipeline import YES, RedisContext, StoredValue, exists, failures, flags, unlink, unlink_same
from .pool import Pool, Pools, Purpose
from .routing import Router

# The maximum length of a Redis string; no server setting raises it.
PAGE_MAX_BYTES = 512 << 20
# The time limit of each step of a listing: it may be long as a whole, but must not hang with a hanging server.
_STEP_S = 60.0
# The most bytes read of a value by a tool: more than any page of an engine has.
_READ_MAX_BYTES = 64 << 20
# Measuring the usage may take this many times `timeout`.
_PATIENCE_TIMEOUTS = 8
# The nodes of a cluster share the threads of a batch: with more nodes than this, some wait for others.
_THREADS_MAX = 16
# Keys of a server that a measurement looks at.
SAMPLE_KEYS = 4096
_SCAN_COUNT = b"1024"
# The limit of SCAN steps in a measurement. Steps may be empty: in a table that has just shrunk, most are.
_SAMPLE_SCANS_MAX = 1024
# The limit of SCAN steps through a whole server: enough for a billion keys, and an end if the cursor never ends.
_SCANS_MAX = 1 << 20
# The lengths of this many pages are read.
_LENGTHS_MAX = 512
# The Redis key of a page after the prefix: the namespace, a colon and the page key.
_NAME = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})")
# A cursor and a count fit into 64 bits.
_COUNT = re.compile(rb"[0-9]{1,20}")
# A listed key may hold a value that is not a string, or may have moved to another node.
_NO_LENGTH = frozenset({ErrorKind.WRONG_TYPE, ErrorKind.MOVED, ErrorKind.ASK})


def open_servers(
    options: RedisStorageOptions, page: bytes = b"", clock: Clock = SYSTEM_CLOCK
) -> tuple[RedisAccess, Pools, Router]:
    """Find the servers and check that they match `options`. If `page` is given, also look up that key as a normal call
    does, so that missing permissions and dead replicas are found now.

    Blocks. Raises BackendUnavailable, and ConfigError if the servers run in a different mode.
    """
    access = open_access(options)
    connector = Connector(access, clock)
    pools = Pools(connector, options.connections, clock)
    deadline = clock() + options.open_timeout
    where = access.where
    with contextlib.ExitStack() as undo:
        undo.callback(pools.close)
        try:
            router = Router(access, connector, pools, deadline, clock)
            undo.callback(router.close)
            if access.mode != "cluster":
                primary = router.routes(deadline).shards[0].primary
                where = access.shown(primary)
                with pools.of(primary, Purpose.KEYS).lease(deadline):
                    pass
            for server in router.by_server([0], [page], to_read=True, deadline=deadline) if page else ():
                if server is None:
                    continue
                where = access.shown(server.address)
                pool = pools.of(server.address, Purpose.KEYS, read_only=server.read_only)
                try:
                    with pool.lease(deadline) as channel:
                        reply = channel.call(b"EXISTS", page, deadline=deadline)
                        if isinstance(reply, ErrorReply):
                            raise reply.failure
                except StoreError as failure:
                    if router.note(failure.kind, server) != ErrorKind.NODE_DOWN:
                        raise  # otherwise the other nodes of the cluster work
        except StoreError as failure:
            if failure.kind is ErrorKind.UNSUPPORTED:
                raise ConfigError(f"backend redis: {failure.detail}") from failure
            raise unavailable(failure, where) from failure
        undo.pop_all()
    return access, pools, router


class RedisDriver:
    """Pages in Redis or Valkey. See the module's docstring; `Driver` documents the functions.

    A server does not report evictions, so `evicted_pages` stays 0.

    The constructor connects and blocks for at most `options.open_timeout`. It raises BackendUnavailable if a server
    cannot be found, reached, logged in to or used; ConfigError if a server runs in a different mode, or a secret or
    file cannot be read; InvalidInput if pages are too long for a Redis string. Open it after a fork, not before:
    connections cannot be shared between processes, and threads do not survive a fork.
    """

    def __init__(self, codec: FrameCodec | None, options: RedisStorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        if codec is not None and codec.frame_bytes > PAGE_MAX_BYTES:
            raise InvalidInput(
                f"redis: a page of {codec.frame_bytes} bytes is longer than a Redis string can be; lower page_size"
            )
        self.options = instance("options", options, RedisStorageOptions)
        self.rejection: str | None = None  # see ExplainsRejections
        page = b"" if codec is None else f"{options.key_prefix}{codec.namespace.hex()}:{bytes(32).hex()}".encode()
        self._access, self._pools, router = open_servers(options, page, clock)
        shards = len(router.routes(clock()).shards)
        # No `on_error`: the call itself counts a page that a bug leaves without an outcome.
        workers = SupervisedPool[Any](
            "redis", min(options.connections * shards, max(options.connections, _THREADS_MAX)) - 1,
            clock=clock,
        )
        self._context = RedisContext(options, router, self._pools, workers, clock, codec is not None)

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Driver. One round trip per server, to all servers in parallel."""
        names = self._context.names(namespace, keys)
        return flags(exists(self._context, names, to_read=True, refresh=False, deadline=deadline))

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Touches. One round trip per server, to all servers in parallel."""
        names = self._context.names(namespace, keys)
        return flags(exists(self._context, names, to_read=False, refresh=True, deadline=deadline))

    def read(self, pages: PageReads[StoredValue]) -> None:
        RedisReads(self._context, pages).move(range(len(pages)))

    def write(self, pages: PageWrites) -> None:
        """See Driver. A page whose reply was lost is ERROR, although it may be stored."""
        RedisWrites(self._context, pages).run()
        self.rejection = FULL if pages.is_full else None

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[StoredValue] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. One round trip per server, which frees the memory in the background. With `found`, the server
        compares and removes atomically."""
        names = self._context.names(namespace, keys)
        if found is None:
            answers = unlink(self._context, names, deadline)
        else:
            answers = unlink_same(self._context, names, found, deadline)
        return answers.count(YES), failures(answers)

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Lists the primaries one by one; namespaces are in no order. A page that exists during the whole
        listing is listed once. Costs the server about a millisecond per thousand keys, of all keys that it holds. On
        servers before 7.2 a listed page counts as used."""
        prefix = self.options.key_prefix.encode()

        def by() -> float:
            return min(deadline, self._context.clock() + _STEP_S)

        with self._primaries(by()) as pools:
            for pool in pools:
                seen = set[bytes]()
                for found in _listed(pool, prefix, namespace, by):
                    fresh = {name: page for name, page in found.items() if name not in seen}
                    seen.update(fresh)
                    if fresh:
                        until = by()
                        yield from pool.run(functools.partial(_described, fresh, until, self._context.clock), until)

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, StoredValue] | None:
        """See Inspects. A value that is not a string has no bytes."""
        (name,) = self._context.names(page.namespace, [page.key])
        size = min(bytes_max, _READ_MAX_BYTES)

        def ask(channel: Channel) -> Reply:
            found = channel.call(b"GETRANGE", name, b"0", b"%d" % (size - 1), deadline=deadline, bytes_max=size)
            return found or channel.call(b"EXISTS", name, deadline=deadline)  # a missing key also has an empty range

        with self._explained():
            (server,) = self._context.router.by_server([0], [name], to_read=False, deadline=deadline)
            if server is None:
                raise StoreError(ErrorKind.CLUSTER_DOWN, "no node has that slot")
            reply = self._pools.of(server.address, Purpose.INSPECTION).run(ask, deadline)
            if isinstance(reply, ErrorReply) and reply.kind is not ErrorKind.WRONG_TYPE:
                raise reply.failure
        if isinstance(reply, bytes):
            return reply, StoredValue(page.bytes if len(reply) == size else len(reply), reply[:HEADER_BYTES])
        return (b"", StoredValue(-1 if isinstance(reply, ErrorReply) else 0)) if reply else None

    def measure(self) -> Usage:
        """See Driver. Counts pages of all namespaces under the key prefix, since they share the server's memory.

        Exact up to SAMPLE_KEYS keys per server, an estimate beyond that. Blocks for a few round trips.
        """
        prefix = self.options.key_prefix.encode()
        deadline = self._context.clock() + _PATIENCE_TIMEOUTS * self.options.timeout
        with self._primaries(deadline, only_working=True) as pools:
            held = [pool.run(lambda channel: _measure(channel, prefix, deadline), deadline) for pool in pools]
        return Usage.total(held)

    @contextlib.contextmanager
    def _primaries(self, deadline: float, *, only_working: bool = False) -> Iterator[list[Pool]]:
        """Yield each primary's pool of inspection connections. Raises StoreError."""
        router = self._context.router
        with self._explained():
            found = [shard.primary for shard in router.routes(deadline).shards]
            yield [self._pools.of(one, Purpose.INSPECTION) for one in found if not only_working or router.works(one)]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Report a StoreError to the router, and add what an operator can do."""
        try:
            yield
        except StoreError as failure:
            self._context.router.note(failure.kind, None)
            failure.explanation = str(unavailable(failure, self._access.where))
            raise

    def explanation(self, kind: str) -> str:
        return ADVICE.get(kind, "")

    def incidents(self) -> Incidents:
        return Incidents(outage=self._context.router.outage)

    def close(self) -> None:
        self._context.router.close()
        self._context.workers.close()
        self._pools.close()


def _listed(pool: Pool, prefix: bytes, namespace: str, deadline: Callable[[], float]) -> Iterator[dict[bytes, PageId]]:
    """Yield the pages on a server, one dictionary per SCAN step: namespace and page key by Redis key. A page may occur
    twice.

    Yields only pages whose namespace digest starts with `namespace` (lower-case hexadecimal). Each step leases a
    connection and has its own deadline from `deadline()`. Raises StoreError.
    """
    cursor, head = b"0", prefix + namespace.encode()
    for _ in range(_SCANS_MAX):
        by = deadline()
        cursor, names = pool.run(functools.partial(_scan, cursor=cursor, deadline=by, pattern=head + b"*"), by)
        matches = [(name, _NAME.fullmatch(name, len(prefix))) for name in names if name.startswith(head)]
        yield {
            name: (bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode()))
            for name, match in matches if match
        }
        if cursor == b"0":
            return
    raise StoreError(ErrorKind.PROTOCOL, "SCAN does not end")


def _described(names: Mapping[bytes, PageId], deadline: float, clock: Clock, channel: Channel) -> list[StoredPage]:
    """Return the pages in `names` (as `_listed` yields them) that still exist, with length and time of last use. Raises
    StoreError."""
    requests = [  # the idle time comes first: on old servers, reading the length counts as a use
        part
        for name in names
        for part in (command(b"OBJECT", b"IDLETIME", name), command(b"STRLEN", name), command(b"EXISTS", name))
    ]
    channel.send([b"".join(requests)], len(requests), deadline)
    lines = channel.read_lines(len(requests), deadline)
    now_s = clock.wall_s()
    pages = []
    for (namespace, key), idle, size, there in zip(names.values(), lines[::3], lines[1::3], lines[2::3], strict=True):
        if _number(there):
            # A value that is not a string is listed without bytes. Under an LFU policy there are no idle times.
            length = _number(size) or 0
            used_s = None if idle.startswith((b"-", b"$-1")) else now_s - (_number(idle) or 0)
            pages.append(StoredPage(namespace, key, length, used_s))
    return pages


def _scan(channel: Channel, cursor: bytes, deadline: float, pattern: bytes = b"*") -> tuple[bytes, list[bytes]]:
    """Make one step of SCAN; return the next cursor, b"0" at the end, and some keys. Raises StoreError."""
    match channel.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT, deadline=deadline):
        case ErrorReply() as error:
            raise error.failure
        case [bytes(following), list(found)] if _COUNT.fullmatch(following):
            return following, [name for name in found if isinstance(name, bytes)]
    raise StoreError(ErrorKind.PROTOCOL, "the reply to SCAN is not valid")


def _measure(channel: Channel, prefix: bytes, deadline: float) -> Usage:
    """Count or estimate the pages on a server whose keys start with `prefix`. `capacity_bytes` is the server's
    maxmemory, None if it has none or does not report it. Raises StoreError."""
    total = channel.call(b"DBSIZE", deadline=deadline)
    if isinstance(total, ErrorReply):
        raise total.failure
    if not isinstance(total, int) or total < 0:
        raise StoreError(ErrorKind.PROTOCOL, "the reply to DBSIZE is not valid")
    # Other users' keys may be megabytes long, so only hashes are kept, and the keys of pages, which are short.
    seen: set[int] = set()
    ours: list[bytes] = []
    cursor = b"0"
    for _ in range(_SAMPLE_SCANS_MAX if total else 0):
        cursor, found = _scan(channel, cursor, deadline)
        for name in found:
            if hash(name) not in seen and name.startswith(prefix) and _NAME.fullmatch(name, len(prefix)):
                ours.append(name)
            seen.add(hash(name))
        if cursor == b"0" or len(seen) >= SAMPLE_KEYS:
            break
    # Keys added during the scan may make the sample larger than the total.
    pages = len(ours) if cursor == b"0" else round(len(ours) * max(1.0, total / max(1, len(seen))))
    # All pages of one model are equally long.
    names, lengths = ours[:_LENGTHS_MAX], list[int]()
    if names:
        channel.send([b"".join([command(b"STRLEN", name) for name in names])], len(names), deadline)
        lines = channel.read_lines(len(names), deadline)
        lengths = [size for line in lines if (size := _number(line)) is not None]
    mean_bytes = sum(lengths) / len(lengths) if lengths else 0.0
    text, capacity = channel.call(b"INFO", b"memory", deadline=deadline), None
    if isinstance(text, bytes):  # managed servers may forbid it
        limit = re.search(rb"^maxmemory:([0-9]{1,20})\r?$", text, re.MULTILINE)
        capacity = int(limit[1]) or None if limit else None
    return Usage(pages, round(pages * mean_bytes), capacity)


def _number(line: bytes) -> int | None:
    """Return the number in the reply to STRLEN or EXISTS; None if the value is not a string or has moved to another
    node. Raises StoreError."""
    if line.startswith(b":") and _COUNT.fullmatch(line, 1):
        return int(line[1:])
    if not line.startswith(b"-"):
        raise StoreError(ErrorKind.PROTOCOL, "a reply is not a number")
    error = ErrorReply(line.removeprefix(b"-"))
    if error.kind in _NO_LENGTH:
        return None
    raise error.failure
