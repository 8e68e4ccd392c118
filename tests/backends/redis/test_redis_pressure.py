"""Stores changed by others: full, evicted from, emptied, or with foreign values."""

from __future__ import annotations

import contextlib

import pytest
from redis.exceptions import MovedError

from hicache.backends.base import SetOutcome, Usage
from hicache.backends.errors import ErrorKind
from hicache.backends.redis import RedisDriver
from hicache.backends.redis.pipeline import StoredValue
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    SET_ERROR,
    STORED,
    Subject,
    driver_of,
    full_frames,
    load,
    make_keys,
    open_backend,
    soon,
    store_chain,
)
from hicache_lab.devservers import RedisCluster, RedisServer, ValkeyServer
from tests.waiting import wait_for

from .store import CODEC, PAGE, fresh_prefix, grow_old, name_of, opened

REJECTED = SetOutcome.REJECTED
# An empty server uses about a tenth of this.
MEMORY_BYTES = 16 << 20
PAGES = 4096


def test_a_full_server_rejects_the_tail_and_keeps_the_head() -> None:
    keys = make_keys(PAGES)
    with ValkeyServer(maxmemory_bytes=MEMORY_BYTES) as server, opened(server) as (backend, store):
        outcomes = store_chain(store, keys)
        head = outcomes.count(STORED)
        assert 0 < head < PAGES
        assert outcomes == [STORED] * head + [REJECTED] * (PAGES - head)
        assert backend.batch_exists(keys, deadline=soon()) == head
        assert backend.usage().pages == head  # no page is stored after the first hole
        assert load(store, keys[: head + 1]) == [HIT] * head + [MISS]
        # A full store is not an error: with a growing error count, a lookup would count the server as down.
        assert dict(backend.statistics().errors) == {}


def test_the_words_about_a_server_that_cannot_evict_and_about_its_acl_are_about_redis() -> None:
    keys = make_keys(PAGES)
    full = ValkeyServer(maxmemory_bytes=MEMORY_BYTES, policy="volatile-lru")
    with full as server, opened(server) as (backend, store):
        store_chain(store, keys[:1])
        assert backend.explanation("rejected") == ""
        assert REJECTED in store_chain(store, keys)
        what, advice = backend.explanation("rejected").split("; ")
        assert "maxmemory" in what and "volatile-* evicts only pages with a `ttl` or `max_age`" in advice
        assert "ACL" in backend.explanation(ErrorKind.ACCESS_DENIED)


def test_a_server_that_limits_values_is_quoted_although_it_closes_the_connection() -> None:
    """It answers while the page is being sent, and closes with a reset. It must not count as unreachable."""
    codec = FrameCodec(NAMESPACE, 4 << 20)
    with ValkeyServer(extra_lines=["proto-max-bulk-len 1mb"]) as server, opened(server, codec) as (backend, store):
        keys = make_keys(3)
        for _ in range(3):
            assert store_chain(store, keys) == [SET_ERROR] * 3
        assert dict(backend.statistics().errors) == {"too_large": 9}
        assert load(store, keys) == [MISS] * 3


def test_one_full_node_of_a_cluster_ends_the_batch_at_its_first_page(own_cluster: RedisCluster) -> None:
    keys = make_keys(1500)
    with opened(own_cluster) as (backend, store), own_cluster.nodes[1].client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 200 * PAGE)
        try:
            outcomes = store_chain(store, keys)
        finally:
            client.config_set("maxmemory", 0)
        head = outcomes.count(STORED)
        assert 10 < head < 1500
        assert outcomes == [STORED] * head + [REJECTED] * (1500 - head)
        assert backend.batch_exists(keys, deadline=soon()) == head
        assert backend.usage().pages == head
        assert dict(backend.statistics().errors) == {}
        assert backend.delete(keys, deadline=soon()) == head


@pytest.mark.parametrize("kind", ["valkey", "old_redis", "redis_cluster"])
def test_a_capacity_is_enforced_on_a_server_without_one(request: pytest.FixtureRequest, kind: str) -> None:
    """The most recently used chain stays whole, and the other one loses its tail."""
    server = request.getfixturevalue(kind)
    assert isinstance(server, (ValkeyServer, RedisServer, RedisCluster))
    old, used, more = make_keys(10, "old"), make_keys(10, "used"), make_keys(30, "more")
    options = server.storage(key_prefix=fresh_prefix())[1]
    with contextlib.closing(open_backend("redis", CODEC, {**options, "capacity": 20 * PAGE})) as limited:
        store = Subject(limited, lambda key: None, lambda key, value: None)
        assert store_chain(store, old) == [STORED] * 10
        for number in range(10):
            for node in server.nodes if isinstance(server, RedisCluster) else [server]:
                with node.client() as client, contextlib.suppress(MovedError):
                    grow_old(client, [f"{options['key_prefix']}{NAMESPACE.hex()}:{old[number].hex()}"])
        assert store_chain(store, used) == [STORED] * 10
        wait_for(lambda: limited.statistics().evicted_pages > 0)
        assert limited.usage() == Usage(18, 18 * PAGE, 20 * PAGE)
        assert load(store, used) == [HIT] * 10
        assert load(store, old) == [HIT] * 8 + [MISS] * 2
        outcomes = store_chain(store, more)
        head = outcomes.count(STORED)
        assert 0 < head < 20 and outcomes == [STORED] * head + [REJECTED] * (30 - head)
        assert dict(limited.statistics().errors) == {}


@pytest.mark.parametrize("kind", ["valkey", "old_redis", "redis_cluster"])
def test_a_touch_refreshes_recency_and_reports_evicted_pages(request: pytest.FixtureRequest, kind: str) -> None:
    server, keys = request.getfixturevalue(kind), make_keys(6)
    with opened(server) as (backend, store):
        store_chain(store, keys[:4])
        if not isinstance(server, RedisCluster):
            with server.client() as client:
                names = [name_of(backend, key) for key in keys[:4]]
                grow_old(client, names)
                assert backend.batch_touch(keys[1:4], deadline=soon()) == []
                ages = [client.object("idletime", name) for name in names]
                assert ages[0] >= 1000 and max(ages[1:]) < 1000
        assert backend.batch_touch(keys, deadline=soon()) == keys[4:]
        assert dict(backend.statistics().errors) == {}


def test_a_touch_renews_the_time_to_live(valkey: ValkeyServer) -> None:
    (key,) = make_keys(1)
    with opened(valkey, ttl=1000) as (backend, store), valkey.client() as client:
        store_chain(store, [key])
        client.expire(name_of(backend, key), 10)
        assert backend.batch_touch([key], deadline=soon()) == []
        assert client.ttl(name_of(backend, key)) > 900


def test_a_touch_on_a_dead_server_reports_no_page_as_missing() -> None:
    keys = make_keys(2)
    with ValkeyServer() as server, opened(server) as (backend, store):
        store_chain(store, keys)
        server.stop()
        assert backend.batch_touch(keys, deadline=soon()) == []
        assert sum(backend.statistics().errors.values()) >= 2


def test_after_random_evictions_a_hit_ends_exactly_at_the_first_hole() -> None:
    keys = make_keys(PAGES)
    with (
        ValkeyServer(maxmemory_bytes=MEMORY_BYTES, policy="allkeys-random") as server,
        opened(server) as (backend, store),
        server.client() as client,
    ):
        assert store_chain(store, keys) == [STORED] * PAGES
        client.config_set("maxmemory", 0)  # otherwise it would continue to evict
        there = [store.read(key) is not None for key in keys]
        assert not all(there) and any(there)
        assert backend.batch_exists(keys, deadline=soon()) == there.index(False)
        assert load(store, keys) == [HIT if one else MISS for one in there]
        whole = [key for key, one in zip(keys, there, strict=True) if one]
        assert backend.batch_exists(whole, deadline=soon()) == len(whole)


@pytest.mark.parametrize("kind", ["list", "hash", "stream"])
def test_a_foreign_value_under_a_page_key_is_corrupt_and_removed(valkey: ValkeyServer, kind: str) -> None:
    keys = make_keys(3)
    with opened(valkey) as (backend, store), valkey.client() as client:
        store_chain(store, keys)
        name = name_of(backend, keys[1])
        client.delete(name)
        if kind == "list":
            client.rpush(name, "a", "b")
        elif kind == "hash":
            client.hset(name, "a", "b")
        else:
            client.xadd(name, {"a": "b"})
        assert load(store, keys) == [HIT, CORRUPT, HIT]
        assert dict(backend.statistics().corrupt) == {"type": 1}
        assert not client.exists(name)
        assert load(store, keys) == [HIT, MISS, HIT]
        assert dict(backend.statistics().errors) == {}


@pytest.mark.parametrize("megabytes", [1, 65])
def test_a_value_far_too_long_costs_only_its_page(valkey: ValkeyServer, megabytes: int) -> None:
    """The shorter value is read and discarded. For the longer one the connection is closed, and all pages after it are
    requested again."""
    keys = make_keys(40)
    with opened(valkey) as (backend, store), valkey.client() as client:
        store_chain(store, keys)
        long_ones = (3, 4, 8, 12, 20, 30)
        for number in long_ones:
            client.setrange(name_of(backend, keys[number]), megabytes << 20, b"x")
        expected = [CORRUPT if number in long_ones else HIT for number in range(40)]
        assert load(store, keys) == expected
        assert dict(backend.statistics().corrupt) == {"size": 6}
        assert dict(backend.statistics().errors) == {}
        assert [store.read(keys[number]) for number in long_ones] == [None] * 6


def test_a_page_stored_again_is_not_removed_as_the_damaged_one(valkey: ValkeyServer) -> None:
    (key,) = make_keys(1)
    with opened(valkey) as (backend, store):
        (frame,) = full_frames(CODEC, [key])
        backend.batch_set([key], [frame], parent=None, deadline=soon())
        size, head = len(frame), bytes(frame[:HEADER_BYTES])
        other = bytes(len(head))
        for length, found_head, kept in (
            (size, other, True), (size - 1, head, True), (-1, b"", True), (size, head, False),
        ):
            value = StoredValue(length, found_head)
            removed, kinds = driver_of(backend, RedisDriver).remove(CODEC.namespace, [key], soon(), [value])
            assert (removed, kinds) == (not kept, [])
            assert (store.read(key) is not None) is kept
        assert not backend.statistics().errors


@pytest.mark.parametrize(
    ("order", "kind"),
    [(("CONFIG", "SET", "min-replicas-to-write", 1), "too_few_replicas"),
     (("ACL", "SETUSER", "default", "-set"), "access_denied"),
     # A demoted primary. No server listens there, so it keeps its pages.
     (("REPLICAOF", "127.0.0.1", 1), "read_only")],
)
def test_a_read_only_server_still_serves_reads(order: tuple[str | int, ...], kind: str) -> None:
    keys = make_keys(6)
    with ValkeyServer() as server, opened(server) as (backend, store), server.client() as client:
        store_chain(store, keys[:2])
        client.execute_command(*order)
        assert store_chain(store, keys) == ["present"] * 2 + [SET_ERROR] * 4
        assert dict(backend.statistics().errors) == {kind: 4}
        assert load(store, keys) == [HIT] * 2 + [MISS] * 4
        if kind == "read_only":
            client.replicaof("no", "one")
            assert store_chain(store, keys) == ["present"] * 2 + [STORED] * 4
