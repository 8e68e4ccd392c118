"""The Redis backend: one string per page, on one server, behind sentinels, or spread over a cluster.

The life of a `batch_get`: the pages are sorted by server; for each server a few connections send GETs ahead, two pages
or `pipeline_bytes` deep, read each value straight into its frame and check it while it is warm. A `batch_set` first
asks which pages are there, then sends the others with SET NX, header and body in one gathering send. Lookups are one
round trip per server. Keys, commands and what they cost are in docs/backends/redis.md.

Locking design: a call owns its batch and leases connections; `Pools`, `Router` and `Calls` have locks of their own, and
none is held while another is taken or a socket is touched. `_usage` is replaced as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ...errors import InvalidInput
from ...frame import FrameCodec
from ..base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage
from ..calls import Calls, check_batch, check_keys
from ..workers import WorkerPool
from .batches import Reads, Writes
from .connect import Connector, check_server
from .errors import ErrorReply, Fault, Trouble
from .options import Endpoint, RedisOptions
from .pool import Pools, Purpose
from .questions import NO, YES, Parts, exists, unlink
from .routing import Router
from .usage import Held, measure

# A Redis string is at most this long, whatever the server is told.
PAGE_MAX_BYTES = 512 << 20
# Finding the servers and asking them at the start, and counting what they hold, may take so many times `timeout_s`.
_PATIENCE_TIMEOUTS = 8
# Nodes share the threads of a batch; more of them than this wait for each other.
_THREADS_MAX = 16


def open_router(options: RedisOptions, connector: Connector, pools: Pools) -> Router:
    """Find the servers and see that they are what the options say.

    Blocks. Raises BackendUnavailable, and ConfigError for servers of another mode.
    """
    deadline = time.monotonic() + _PATIENCE_TIMEOUTS * options.timeout_s
    where = options.where
    try:
        if options.mode == "cluster":
            _check_any(options, pools, deadline)
        router = Router(options, connector, pools, deadline)
        if options.mode != "cluster":
            primary = router.routes(deadline).shards[0].primary
            where = options.shown(primary)
            with pools.of(primary, Purpose.QUESTIONS).lease(deadline) as channel:
                check_server(channel, options.mode, deadline)
    except Trouble as trouble:
        raise trouble.unavailable(where) from trouble
    return router


def _check_any(options: RedisOptions, pools: Pools, deadline: float) -> None:
    trouble = Trouble(Fault.CLUSTER_DOWN)
    for address in options.addresses:
        try:
            with pools.of(address, Purpose.QUESTIONS).lease(deadline) as channel:
                check_server(channel, options.mode, deadline)
            return
        except Trouble as error:
            trouble = error
    raise trouble


class RedisBackend(StorageBackend):
    """Pages in Redis or Valkey. See the module's docstring; `StorageBackend` says what each verb does.

    The constructor connects and blocks for a few times `timeout_s` at most. It raises BackendUnavailable for a server
    that cannot be found, reached, entered or used, ConfigError for one of another mode, InvalidInput for pages too long
    for a Redis string. Open it after a fork and not before: connections are not shared between processes, and threads
    do not survive one.
    """

    def __init__(self, codec: FrameCodec, options: RedisOptions) -> None:
        super().__init__(codec)
        if codec.frame_bytes > PAGE_MAX_BYTES:
            raise InvalidInput(f"redis: a page of {codec.frame_bytes} bytes is longer than a Redis string can be")
        self.options = options
        self._calls = Calls(codec)
        self._close_lock = threading.Lock()
        self._usage = Usage(0, 0, None)
        connector = Connector(options)
        self._pools = Pools(connector, options.connections)
        try:
            router = open_router(options, connector, self._pools)
            self._probe(router, head := f"{options.key_prefix}{codec.namespace.hex()}:".encode())
        except BaseException:
            self._pools.close()
            raise
        shards = len(router.routes(time.monotonic()).shards)
        workers = WorkerPool(
            min(options.connections * shards, max(options.connections, _THREADS_MAX)),
            "hicache-redis",
            lambda: self._calls.count(errors=["internal"]),
        )
        self._parts = Parts(codec, options, head, router, self._pools, workers)

    def _probe(self, router: Router, head: bytes) -> None:
        """Ask for a page, as every call will: credentials, ACL and replicas are seen now rather than by no hit ever."""
        deadline = time.monotonic() + _PATIENCE_TIMEOUTS * self.options.timeout_s
        name = head + bytes(32).hex().encode()
        where = self.options.where
        try:
            for server in router.by_server([0], [name], to_read=True, deadline=deadline):
                if server is None:
                    continue
                where = self.options.shown(server.address)
                pool = self._pools.of(server.address, Purpose.QUESTIONS, read_only=server.read_only)
                with pool.lease(deadline) as channel:
                    reply = channel.call(b"EXISTS", name, deadline=deadline)
                    if isinstance(reply, ErrorReply):
                        raise reply.trouble
        except Trouble as trouble:
            raise trouble.unavailable(where) from trouble

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. One round trip per server, on all of them at once."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            names = self._parts.names(keys)
            asked = exists(self._parts, names, range(len(keys)), to_read=True, refresh=False, deadline=deadline)
            self._calls.count(errors=asked.errors)
            for position, answer in enumerate(asked.answers):
                if answer != YES:
                    return position
            return len(keys)

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, frames)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_gets(len(keys))
            batch = Reads(self._parts, keys, frames, deadline)
            try:
                batch.run()
            finally:
                self._calls.count(gets=batch.outcomes, errors=batch.errors, corrupt=batch.corrupt)
        return batch.outcomes

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. A page whose answer was lost may have been stored: ERROR then says that nobody knows."""
        check_batch(self.codec, keys, frames, parent)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_sets(len(keys))
            batch = Writes(self._parts, keys, frames, parent, deadline)
            try:
                batch.run()
            finally:
                self._calls.count(sets=batch.outcomes, errors=batch.errors)
        return batch.outcomes

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. One round trip per server; memory is freed by the server's own threads."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            asked = unlink(self._parts, self._parts.names(keys), range(len(keys)), deadline)
            self._calls.count(errors=asked.errors)
            return sum(answer not in (None, NO) for answer in asked.answers)

    def usage(self) -> Usage:
        """See StorageBackend. Pages of all namespaces under the key prefix, since they share the server's memory.

        Exact up to usage.SAMPLE_KEYS keys per server, an estimate beyond. Blocks for a few round trips.
        """
        with self._calls.enter() as is_open:
            if is_open:
                deadline = time.monotonic() + _PATIENCE_TIMEOUTS * self.options.timeout_s
                try:
                    shards = self._parts.router.routes(deadline).shards
                    held = [self._measure(shard.primary, deadline) for shard in shards]
                except Trouble as trouble:
                    self._parts.router.note(trouble.fault, None)
                    self._calls.count(errors=[trouble.fault])
                else:
                    limits = [one.limit_bytes for one in held]
                    self._usage = Usage(
                        sum(one.pages for one in held),
                        sum(one.bytes for one in held),
                        None if None in limits else sum(limit or 0 for limit in limits),
                    )
        return self._usage

    def _measure(self, primary: Endpoint, deadline: float) -> Held:
        prefix = self.options.key_prefix.encode()
        pool = self._pools.of(primary, Purpose.INSPECTION)
        return pool.run(lambda channel: measure(channel, prefix, deadline), deadline)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. What a server evicts it does not tell: `evicted_pages` stays 0."""
        return self._calls.statistics()

    def close(self) -> None:
        """See StorageBackend."""
        with self._close_lock:
            if self._calls.close():
                self._parts.workers.close()
                self._pools.close()

