"""The Redis backend: one string per page, on one server, behind sentinels, or spread over a cluster.

The life of a `batch_get`: the pages are sorted by server; for each server a few connections send GETs ahead, two pages
or `pipeline` deep, read each value straight into its page and check it while it is warm. A `batch_set` first
asks which pages are there, then sends the others with SET NX, header and body in one gathering send. Lookups are one
round trip per server. Keys, commands and what they cost are in docs/backends/redis.md.

Locking design: a call owns its batch and leases connections; `Pools` and `Router` have locks of their own, and none is
held while another is taken or a socket is touched. Everything else is set once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...arguments import instance
from ...config.redis_storage import RedisStorageOptions
from ...errors import InvalidInput
from ...frame import FrameCodec
from ...supervised import SupervisedPool
from ..base import Usage
from ..envelope import Touchable
from ..errors import ErrorKind, StoreError
from ..pages import Damaged, PageReads, PageWrites
from ..store import PageStore
from .batches import Reads, Writes
from .connect import Connector, check_server
from .errors import ErrorReply, unavailable
from .options import Access, open_access
from .pipeline import NO, YES, RedisContext, StoredValue, exists, failures, unlink, unlink_same
from .pool import Pool, Pools, Purpose
from .routing import Router
from .usage import listed, measure

# A Redis string is at most this long, whatever the server is told.
PAGE_MAX_BYTES = 512 << 20
# Finding the servers and asking them at the start, and counting what they hold, may take so many times `timeout`.
_PATIENCE_TIMEOUTS = 8
# Nodes share the threads of a batch; more of them than this wait for each other.
_THREADS_MAX = 16


def open_servers(options: RedisStorageOptions, page: bytes = b"") -> tuple[Access, Pools, Router]:
    """Find the servers, check that they are what `options` say, and ask for the name `page` as every call will, if it
    is given: missing rights and dead replicas are seen now.

    Blocks. Raises BackendUnavailable, and ConfigError for servers of another mode.
    """
    access = open_access(options)
    connector = Connector(access)
    pools = Pools(connector, options.connections)
    deadline = time.monotonic() + _PATIENCE_TIMEOUTS * options.timeout
    where = access.where
    with contextlib.ExitStack() as undo:
        undo.callback(pools.close)
        try:
            if access.mode == "cluster":
                _check_any(access, pools, deadline)
            router = Router(access, connector, pools, deadline)
            if access.mode != "cluster":
                primary = router.routes(deadline).shards[0].primary
                where = access.shown(primary)
                with pools.of(primary, Purpose.KEYS).lease(deadline) as channel:
                    check_server(channel, access.mode, deadline)
            for server in router.by_server([0], [page], to_read=True, deadline=deadline) if page else ():
                if server is None:
                    continue
                where = access.shown(server.address)
                pool = pools.of(server.address, Purpose.KEYS, read_only=server.read_only)
                with pool.lease(deadline) as channel:
                    reply = channel.call(b"EXISTS", page, deadline=deadline)
                    if isinstance(reply, ErrorReply):
                        raise reply.failure
        except StoreError as failure:
            raise unavailable(failure, where) from failure
        undo.pop_all()
    return access, pools, router


def _check_any(access: Access, pools: Pools, deadline: float) -> None:
    failure = StoreError(ErrorKind.CLUSTER_DOWN)
    for address in access.addresses:
        try:
            with pools.of(address, Purpose.KEYS).lease(deadline) as channel:
                check_server(channel, access.mode, deadline)
            return
        except StoreError as error:
            failure = error
    raise failure


class RedisBackend(PageStore[StoredValue], Touchable):
    """Pages in Redis or Valkey. See the module's docstring; `StorageBackend` says what each verb does.

    A server does not tell what it evicts, so `evicted_pages` stays 0.

    The constructor connects and blocks for a few times `timeout` at most. It raises BackendUnavailable for a server
    that cannot be found, reached, entered or used, ConfigError for one of another mode and for a secret or file that
    cannot be read, InvalidInput for pages too long for a Redis string. Open it after a fork and not before: connections
    are not shared between processes, and threads do not survive one.
    """

    def __init__(self, codec: FrameCodec, options: RedisStorageOptions) -> None:
        super().__init__(codec)
        if codec.frame_bytes > PAGE_MAX_BYTES:
            raise InvalidInput(f"redis: a page of {codec.frame_bytes} bytes is longer than a Redis string can be")
        self.options = instance("options", options, RedisStorageOptions)
        head = f"{options.key_prefix}{codec.namespace.hex()}:".encode()
        _, self._pools, router = open_servers(options, head + bytes(32).hex().encode())
        shards = len(router.routes(time.monotonic()).shards)
        # A page that a bug leaves without an outcome is counted with its call.
        workers = SupervisedPool[Any](
            "redis", min(options.connections * shards, max(options.connections, _THREADS_MAX)) - 1
        )
        self._context = RedisContext(codec, options, head, router, self._pools, workers)

    def find(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See PageStore. One round trip per server, on all of them at once."""
        answers = exists(self._context, self._context.names(keys), to_read=True, refresh=False, deadline=deadline)
        self.count(*failures(answers))
        return [answer == YES for answer in answers]

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable. One round trip per server, on all of them at once."""
        answers = exists(self._context, self._context.names(keys), to_read=False, refresh=True, deadline=deadline)
        self.count(*failures(answers))
        return [key for key, answer in zip(keys, answers, strict=True) if answer == NO]

    def read(self, pages: PageReads[StoredValue]) -> None:
        """See PageStore."""
        Reads(self._context, pages).move(range(len(pages)))

    def write(self, pages: PageWrites) -> None:
        """See PageStore. ERROR for a page whose answer was lost: it may have been stored."""
        Writes(self._context, pages).run()

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. One round trip per server; memory is freed by the server's own threads."""
        answers = unlink(self._context, self._context.names(keys), deadline)
        self.count(*failures(answers))
        return answers.count(YES)

    def remove_damaged(self, damaged: Sequence[Damaged[StoredValue]], deadline: float) -> None:
        """See PageStore. One round trip per server, which compares and removes in one step."""
        self.count(*failures(unlink_same(self._context, damaged, deadline)))

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore. The server's time grows with everything in it: about a millisecond per thousand keys."""
        prefix, namespace = self.options.key_prefix.encode(), self.codec.namespace.hex()
        with self._primaries(deadline) as pools:
            for pool in pools:
                for found in listed(pool, prefix, namespace, lambda: deadline):
                    yield from (key for _, key in found.values())

    def measure(self) -> Usage:
        """See PageStore. Pages of all namespaces under the key prefix, since they share the server's memory.

        Exact up to usage.SAMPLE_KEYS keys per server, an estimate beyond. Blocks for a few round trips.
        """
        prefix = self.options.key_prefix.encode()
        deadline = time.monotonic() + _PATIENCE_TIMEOUTS * self.options.timeout
        with self._primaries(deadline) as pools:
            held = [pool.run(lambda channel: measure(channel, prefix, deadline), deadline) for pool in pools]
        return Usage.total(held)

    @contextlib.contextmanager
    def _primaries(self, deadline: float) -> Iterator[list[Pool]]:
        """Lend connections to look at what each primary holds. Notes failures of them. Raises StoreError."""
        try:
            shards = self._context.router.routes(deadline).shards
            yield [self._pools.of(shard.primary, Purpose.INSPECTION) for shard in shards]
        except StoreError as failure:
            self._context.router.note(failure.kind, None)
            raise

    def shut(self) -> None:
        """See PageStore."""
        self._context.workers.close()
        self._pools.close()
