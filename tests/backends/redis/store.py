"""Helpers of the Redis tests: opening a store on a server, and its side door."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from hicache.backends.redis import RedisDriver
from hicache.backends.store import Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.redis_storage import RedisStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, Subject, driver_of, store_of
from hicache_lab.devservers import RedisCluster
from hicache_lab.devservers.redis import RedisLike

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes
_serial = itertools.count()


def fresh_prefix() -> str:
    """Return a key prefix that no other test of this session uses."""
    return f"test{next(_serial)}:"


def name_of(backend: Store, key: bytes) -> str:
    """Return the Redis key of a page."""
    return f"{driver_of(backend, RedisDriver).options.key_prefix}{backend.codec.namespace.hex()}:{key.hex()}"


def open_on(
    client: Any, options: dict[str, Any], codec: FrameCodec = CODEC, clock: Clock = SYSTEM_CLOCK
) -> Subject:
    """Open a store with `options`; `client`, of the `redis` package, is its side door."""
    backend = store_of(RedisDriver, codec, RedisStorageOptions(**options), clock)

    def write(key: bytes, value: bytes) -> None:
        client.set(name_of(backend, key), value)

    return Subject(backend, lambda key: client.get(name_of(backend, key)), write)


def grow_old(client: Any, names: Iterable[str], seconds: int = 1000) -> None:
    """Make the server treat these keys as last used `seconds` ago."""
    for name in names:
        client.restore(name, 0, client.dump(name), replace=True, idletime=seconds)


@contextlib.contextmanager
def opened(
    server: RedisLike | RedisCluster, codec: FrameCodec = CODEC, **options: Any
) -> Iterator[tuple[Store, Subject]]:
    """Open a backend and its store on a test server; close it at the end. On a cluster it has no side door."""
    with contextlib.nullcontext() if isinstance(server, RedisCluster) else server.client() as client:
        store = open_on(client, server.storage(**{"key_prefix": fresh_prefix(), **options})[1], codec)
        assert isinstance(store.backend, Store)
        try:
            yield store.backend, store
        finally:
            store.backend.close()


