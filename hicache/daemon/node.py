"""The node: the namespaces that engines have opened, over one configured storage, and the memory of these engines.

Each namespace has its own store: the configured `storage`, opened with a codec of that namespace, behind the pool that
all namespaces share. A namespace opens without its store, which is opened in the background. Clients exchange plain
frames sealed with XXH3-128; MACs, encryption and compression are those of the daemon's configuration.

Locking design: `_changed` guards the table of namespaces and `state`; it is not held for blocking calls. One thread
opens or closes a namespace, after putting its digest into `_busy`; other threads wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

from ..arguments import model_label
from ..backends.base import Direction, GetOutcome
from ..backends.compose import copies_of
from ..backends.errors import ErrorKind
from ..backends.opening import StorageOpener
from ..backends.registry import check_backend
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..config.daemon import DaemonConfig
from ..config.storage import max_age_of
from ..errors import ConfigError, HiCacheError, InvalidInput
from ..frame import FrameCodec
from ..ghosts import PageAccounts
from ..host_memory import RESERVE_BYTES, host_memory, resolve, shortage
from ..units import format_size
from .attachment import Attachment
from .memory import Memories
from .namespace import ServedNamespace, not_open
from .pool import DaemonPool
from .protocol import OpenNamespace, Refused
from .sharing import SharedStore
from .statistics import CallCounters, NamespaceStatistics, NodeState, NodeStatistics

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Open stores of namespaces that no engine uses: engines that restart, such as the ranks of a node, find their stores
# open and their counts continued, and those of earlier weights are closed soon.
_IDLE_STORES_MAX = 8
# A namespace may have this part of all requests, so that a slow store leaves most of them to others.
_SHARES = 4


def pool_bytes_of(section: DaemonConfig) -> int:
    """Return the size of the pool. Raises ConfigError unless all memory that a daemon takes at its start is available:
    otherwise the kernel would end the process in the middle of it, without a word."""
    available, pool_bytes = host_memory().available_bytes, resolve(section.pool, "daemon.pool")
    short = shortage({f"daemon.pool ({section.pool})": pool_bytes, "daemon.staging": section.staging}, available)
    if short is not None:
        most = format_size(max(0, available - RESERVE_BYTES - section.staging))
        raise ConfigError(f"daemon: {short}; lower daemon.pool to at most {most}, or lower daemon.staging")
    return pool_bytes


class Node:
    """See the module's docstring. `instance` is a new random text in each run of a daemon.

    Raises ConfigError for unreadable keys, without both storage and pool, and if the pool does not fit. Does not open
    stores. Blocks while the pool's memory is touched.
    """

    def __init__(
        self, config: HiCacheConfig, environ: Mapping[str, str] | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.config = config
        self.clock = clock
        self.instance = secrets.token_hex(16)
        self.state = NodeState.STARTING
        self.calls = CallCounters()
        self.memories = Memories(clock=clock)
        self.environ = os.environ if environ is None else environ
        self.storage = Attachment(StorageOpener(config, self.environ, clock=clock), clock)
        self.quotas: dict[str, int] = {}  # bytes of the pool, by namespace
        if config.storage is None and not config.daemon.pool:
            raise ConfigError("daemon: needs storage or a pool; add the section `storage`, or daemon.pool")
        if (spec := self.storage.opener.spec) is not None:
            check_backend(spec.type, spec.options)
        pool_bytes = pool_bytes_of(config.daemon)
        try:
            accounts = PageAccounts(config.explain.pages, max_age_of(config.storage), clock)
            self.pool = DaemonPool(pool_bytes, accounts, is_adaptive=config.daemon.eviction_policy == "adaptive")
        except OSError as error:
            size = format_size(pool_bytes)
            raise ConfigError(f"daemon.pool: cannot allocate {size}: {error.strerror}; use a smaller size") from error
        self._began_s = self.clock()
        self._changed = threading.Condition()
        self._namespaces: dict[str, ServedNamespace] = {}
        self._busy: set[str] = set()

    def open(self, digest: str, request: OpenNamespace, deadline: float, engine: str = "") -> ServedNamespace:
        """Return the namespace; open it if necessary. Blocks until the first attempt to open its store has ended, at
        most for half of the caller's time: the rest is for the answer. `engine` names an engine that will release the
        namespace. Raises Refused."""
        with self._turn(digest, deadline):
            found = self._namespaces.get(digest)
            if found is not None:
                if found.wire.payload_bytes != request.payload_bytes:
                    detail = f"namespace: is open with pages of {found.wire.payload_bytes} bytes; end its engines first"
                    raise Refused(409, ErrorKind.CONFLICT, detail)
                with self._changed:
                    is_closed = found.use(engine)
                if is_closed:
                    self.storage.changed(found)
                self._wait_for_store(found, deadline)
                return found
            self._make_room(deadline)
            made = self._open(bytes.fromhex(digest), request, engine)
            self._wait_for_store(made, deadline)  # other calls for it wait, too
            with self._changed:
                self._namespaces[digest] = made
            logger.info("namespace %s (%s): opened, pages of %s", digest[:8], made.label or "no label",
                        format_size(made.wire.frame_bytes))
            return made

    def _wait_for_store(self, namespace: ServedNamespace, deadline: float) -> None:
        began_s = self.clock()
        namespace.store.slot.wait(began_s + (deadline - began_s) / 2)

    def release(self, digest: str, engine: str, deadline: float) -> None:
        """End the use of a namespace by an engine. Of the namespaces that no engine uses, only the most recently used
        ones keep their stores; the other stores are closed in the background, and their pages stay in the pool.
        Raises Refused (404) for a namespace that is not open."""
        with self._turn(digest, deadline), self._changed:
            self.find(digest).release(engine)
            idle = [one for one in self._namespaces.values() if not one.has_engines]
            idle.sort(key=lambda one: one.last_use_s)
            retired = [one for one in idle[:-_IDLE_STORES_MAX] if not one.is_retired]
            for namespace in retired:
                namespace.is_retired = True
        for namespace in retired:
            self.storage.changed(namespace)

    def find(self, digest: str) -> ServedNamespace:
        """Return an open namespace. Does not block. Raises Refused (404)."""
        found = self._namespaces.get(digest)
        if found is None:
            raise not_open()
        return found

    async def call(self, namespace: ServedNamespace, verb: Callable[..., T]) -> tuple[T, list[str]]:
        """Run a verb on a thread of its namespace; return its result, and the kinds of its errors, for which it gets
        a list `errors`. Raises Refused.

        Errors of one of several stores are not returned while another one works: the guard of an engine would consider
        the whole daemon down. Pages that could not be read are then misses. With a pool, SharedStore does the same.
        """

        def call() -> tuple[T, list[str]]:
            errors: list[str] = []
            answer = verb(errors=errors)
            if errors and len(namespace.store.stores) > 1 and namespace.store.may_pass(Direction.READ):
                return _as_misses(answer), []
            return answer, errors

        return await namespace.submit(call, max(1, self.config.daemon.connections_max // _SHARES))

    def namespaces(self) -> list[ServedNamespace]:
        """Return all open namespaces, in order of their opening."""
        return list(self._namespaces.values())

    def statistics(self) -> NodeStatistics:
        """Return a snapshot. Does not call guarded stores; blocks for moments."""
        calls = self.calls
        return NodeStatistics(
            instance=self.instance, state=self.state, uptime_s=self.clock() - self._began_s,
            pool=self.pool.statistics(), namespaces=tuple(map(self._statistics, self.namespaces())),
            clients=self.memories.statistics(), connections=dict(calls.connections),
            connections_max=self.config.daemon.connections_max, requests=dict(calls.requests),
            refused=dict(calls.refused), latency=calls.latency(), in_flight_requests=calls.in_flight,
            hot=self.pool.hot(),
        )

    def reconfigure(self, config: HiCacheConfig) -> None:
        """Apply new limits now, and new overrides and keys to stores that are opened later. Raises ConfigError and then
        changes nothing."""
        opener = StorageOpener(config, self.environ, clock=self.clock)
        self.config, self.storage.opener = config, opener

    def set_quota(self, digest: str, quota_bytes: int | None) -> None:
        """Limit the bytes of a namespace in the pool, now and when it is opened again; None removes the limit."""
        with self._changed:
            self.quotas = {other: quota for other, quota in self.quotas.items() if other != digest}
            if quota_bytes is not None:
                self.quotas[digest] = quota_bytes
            found = self._namespaces.get(digest)
        if found is not None:
            self.pool.set_quota(found.space, quota_bytes)

    def close(self, deadline: float) -> None:
        """Close all namespaces and unmap memory; wait until `deadline` for operations in flight. Idempotent."""
        with self._changed:
            self.state = NodeState.DRAINING
        self.storage.close(max(0.0, deadline - self.clock()))
        self.memories.close(deadline)
        with self._changed:
            closing, self._namespaces = self.namespaces(), {}
        for namespace in closing:
            self._close(namespace)

    def _open(self, digest: bytes, request: OpenNamespace, engine: str) -> ServedNamespace:
        epoch, label = request.weights_epoch, model_label(request.label)
        try:
            codec = self.storage.opener.codec(digest, request.payload_bytes, weights_epoch=epoch, label=label)
            wire = FrameCodec(digest, request.payload_bytes, weights_epoch=epoch, label=label, clock=self.clock)
        except HiCacheError as error:  # for example a label that is too long
            raise Refused(422, ErrorKind.BAD_REQUEST, str(error)) from error
        try:
            store = SharedStore(codec, self.pool, None, label=label, slot=self.storage.slot(codec), clock=self.clock)
        except InvalidInput as error:
            detail = "namespace: is being closed with pages of another size; try again"
            raise Refused(503, ErrorKind.BUSY, detail, 1) from error
        space = store.pages.space
        self.pool.set_quota(space, self.quotas.get(digest.hex()))
        made = ServedNamespace(
            wire, store, space, weights_epoch=epoch, label=label, threads=self.config.daemon.threads, clock=self.clock
        )
        made.use(engine)
        self.storage.joined(made)
        return made

    def _close(self, namespace: ServedNamespace) -> None:
        self.storage.left(namespace)
        namespace.close()

    def _statistics(self, namespace: ServedNamespace) -> NamespaceStatistics:
        store = namespace.store
        return NamespaceStatistics(
            namespace=namespace.digest, label=namespace.label, weights_epoch=namespace.weights_epoch,
            frame_bytes=namespace.wire.frame_bytes, pool_bytes=self.pool.space_bytes(namespace.space),
            quota_bytes=namespace.space.quota_bytes, sharing=store.sharing(), backend=store.statistics(),
            stores=store.slot.leaves(),
            copies={name: copies for one in store.slot.open_backends() for name, copies in copies_of(one).items()},
            opening=store.slot.waiting if store.slot.is_awaited and store.slot.waiting.attempts else None,
        )

    def _make_room(self, deadline: float) -> None:
        """Close the least recently used namespace without calls in flight if there are too many, first one without
        engines. Raises Refused if all have calls."""
        with self._changed:
            if len(self._namespaces) < self.config.daemon.namespaces_max:
                return
            idle = [one for one in self._namespaces.values() if not one.in_flight]
            if not idle:
                raise Refused(503, ErrorKind.BUSY, "namespace: too many are in use; raise daemon.namespaces_max", 10)
            oldest = min(idle, key=lambda one: (one.has_engines, one.last_use_s))
            del self._namespaces[oldest.digest]
        self._close(oldest)

    @contextlib.contextmanager
    def _turn(self, digest: str, deadline: float) -> Iterator[None]:
        """Let one thread at a time open a namespace."""
        with self._changed:
            if not self.clock.wait_for(self._changed, lambda: digest not in self._busy, deadline):
                raise Refused(503, ErrorKind.TIMEOUT, "namespace: its store is still being opened; try again", 1)
            self._busy.add(digest)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(digest)
                self._changed.notify_all()


def _as_misses(answer: T) -> T:
    """Return the result of a read with a miss for each failed page, and any other result unchanged."""
    if isinstance(answer, list):  # `is`: a failed write has an equal value
        return cast(T, [GetOutcome.MISS if one is GetOutcome.ERROR else one for one in answer])
    return answer
