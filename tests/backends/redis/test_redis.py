"""The Redis backend against the contract, and its sample on each other kind of server and connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hicache.backends.base import StoredPage, Usage
from hicache.backends.pages import PageWrites
from hicache.backends.redis import RedisDriver
from hicache.backends.redis.batches import RedisWrites
from hicache.backends.registry import BackendSpec, open_stored
from hicache.backends.store import Store
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    HIT,
    MISS,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    DriverContract,
    OpenStore,
    SampleContract,
    driver_of,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache_lab.devservers import DevService, RedisCluster, RedisSentinel, RedisServer, ValkeyServer
from hicache_lab.devservers.redis import RedisLike
from tests.certificates import make_certificates
from tests.proxy import Proxy
from tests.servers import PATIENCE
from tests.waiting import wait_for

from .store import CODEC, PAGE, grow_old, name_of, open_on, opened

# For the places that a server's `storage` does not name.
_PATIENT = {"timeout": PATIENCE}
DOCUMENT = Path(__file__).resolve().parents[3] / "docs/backends/redis.md"


def opener(client: Any, prefix: str, options: dict[str, Any]) -> Iterator[OpenStore]:
    """Open a store for one test, and empty it afterwards: a server with many keys would be sampled, not counted."""
    yield lambda codec: open_on(client, options, codec)
    for name in client.scan_iter(f"{prefix}*", count=1000):
        client.unlink(name)


class TestValkey(DriverContract):
    @pytest.fixture
    def open_store(self, valkey: ValkeyServer, unique_prefix: str) -> Iterator[OpenStore]:
        with valkey.client() as client:
            yield from opener(client, unique_prefix, valkey.storage(key_prefix=unique_prefix)[1])


@pytest.fixture(scope="module")
def tls_options(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options for the shared server over mutual TLS: a proxy ends TLS and forwards plain text to the server."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    with Proxy(valkey.port, tls=made.server_context(ask_client=True)) as proxy:
        yield {
            "url": f"rediss://127.0.0.1:{proxy.port}", "tls_ca_file": made.ca_file,
            "tls_cert_file": made.client_cert_file, "tls_key_file": made.client_key_file,
        }


@pytest.fixture(scope="module")
def places(
    valkey: ValkeyServer, old_redis: RedisServer, redis_cluster: RedisCluster, redis_sentinel: RedisSentinel,
    tls_options: dict[str, Any],
) -> Iterator[dict[str, tuple[Any, dict[str, Any]]]]:
    """Side doors and options. Shared, because opening a cluster's door takes as long as a contract test."""
    with (
        valkey.client() as client, old_redis.client() as old, redis_sentinel.primary.client() as primary,
        redis.RedisCluster("127.0.0.1", redis_cluster.nodes[0].port) as cluster,
    ):
        yield {
            "unix socket": (client, valkey.unix_storage()[1]),
            # A time to live and one connection use different commands and timing.
            "old server": (old, old_redis.storage(ttl=600.0, connections=1)[1]),
            "cluster": (cluster, redis_cluster.storage()[1]),
            "sentinel": (primary, redis_sentinel.storage()[1]),
            # One connection for bodies, because handshakes take most of the time of these tests.
            "tls": (client, {**tls_options, "connections": 1}),
        }


@pytest.mark.parametrize("place", ["unix socket", "old server", "cluster", "sentinel", "tls"])
class TestOtherPlaces(SampleContract):
    """Other connections, versions and topologies."""

    @pytest.fixture
    def open_store(
        self, places: dict[str, tuple[Any, dict[str, Any]]], place: str, unique_prefix: str
    ) -> Iterator[OpenStore]:
        client, options = places[place]
        yield from opener(client, unique_prefix, {**options, **_PATIENT, "key_prefix": unique_prefix})


@pytest.mark.parametrize(("kind", "ttl_s"), [(ValkeyServer, None), (ValkeyServer, 60.0), (RedisServer, 60.0)])
def test_a_user_with_the_documented_rights_can_do_everything(
    login: Callable[[DevService], None], kind: type[RedisLike], ttl_s: float | None
) -> None:
    (line,) = (line for line in DOCUMENT.read_text().splitlines() if "ACL SETUSER engine" in line)
    acl = line.split(">PASSWORD ")[1] + " +ping"  # the tests use it to check that the server is up
    keys = make_keys(3)
    with kind(password="pass word", user="engine", acl=acl) as server:
        login(server)
        with opened(server, key_prefix="hicache:", ttl=ttl_s, db=2) as (backend, store):
            assert store_chain(store, keys) == [STORED] * 3
            assert backend.batch_exists(keys, deadline=soon()) == 3
            assert load(store, keys) == [HIT] * 3
            assert backend.usage().pages == 3
            with contextlib.closing(open_stored(BackendSpec("redis", server.storage(db=2)[1]))) as raw:
                assert len(list(raw.pages())) == 3
            short = StoredPage(CODEC.namespace, make_keys(4)[3], 3, None)
            with contextlib.closing(open_stored(BackendSpec("redis", server.storage(db=2)[1]))) as raw:
                assert raw.write(short, b"abc", None)
            assert load(store, make_keys(4)) == [HIT] * 3 + ["corrupt"]
            assert backend.delete(make_keys(4), deadline=soon()) == 3
            assert dict(backend.statistics().errors) == {}


@pytest.mark.parametrize("kind", ["valkey", "redis_cluster"])
def test_clear_removes_every_page_of_its_namespace_and_nothing_else(
    request: pytest.FixtureRequest, kind: str, unique_prefix: str
) -> None:
    """With more pages than one step of SCAN lists, and a second namespace under the same prefix."""
    keys = make_keys(2500)
    options = request.getfixturevalue(kind).storage(key_prefix=unique_prefix)[1]
    ours, theirs = open_on(None, options), open_on(None, options, FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    store_chain(ours, keys)
    store_chain(theirs, keys[:10])
    assert ours.backend.clear(deadline=soon()) == 2500
    assert ours.backend.usage().pages == 10
    assert load(theirs, keys[:10]) == [HIT] * 10
    assert dict(ours.backend.statistics().errors) == {}
    for store in (ours, theirs):
        store.backend.clear(deadline=soon())
        store.backend.close()


@pytest.mark.parametrize("way", ["tcp", "unix", "tls"])
def test_pages_in_more_than_a_thousand_parts_are_moved_whole(
    valkey: ValkeyServer, tls_options: dict[str, Any], unique_prefix: str, way: str
) -> None:
    """A system call takes 1,024 buffers: one page has more, and a connection has many pages in flight."""
    places = {"tcp": valkey.storage()[1], "unix": valkey.unix_storage()[1], "tls": tls_options}
    keys = make_keys(20)
    store = open_on(None, {**places[way], **_PATIENT, "key_prefix": unique_prefix})
    views = [in_parts(CODEC, frame, parts=1500) for frame in full_frames(CODEC, keys)]
    assert store.backend.batch_set(keys, views, parent=None, deadline=soon()) == [STORED] * 20
    assert load(store, keys) == [HIT] * 20
    read = [in_parts(CODEC, frame, parts=1300) for frame in empty_frames(CODEC, 20)]
    assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT] * 20
    assert all(holds(CODEC, key, page) for key, page in zip(keys, read, strict=True))
    assert store.backend.clear(deadline=soon()) == 20
    store.backend.close()


@pytest.mark.parametrize("of_other", [{}, {"key_prefix": "same:", "db": 1}], ids=["prefix", "database"])
def test_another_prefix_or_database_of_a_server_is_another_store(
    valkey: ValkeyServer, of_other: dict[str, Any]
) -> None:
    keys = make_keys(3)
    with opened(valkey, key_prefix="same:") as (_, one), opened(valkey, **of_other) as (_, other):
        store_chain(one, keys)
        assert load(other, keys) == [MISS] * 3
        assert (one.backend.usage().pages, other.backend.usage().pages) == (3, 0)


@pytest.mark.parametrize("ttl_s", [None, 900.0])
def test_a_page_that_another_engine_stored_after_the_lookup_is_not_replaced(
    valkey: ValkeyServer, ttl_s: float | None
) -> None:
    """The transfer alone, without the lookup before it, is what a late engine does. The missing page is the control."""
    keys = make_keys(2)
    with opened(valkey, ttl=ttl_s) as (backend, store):
        store.write(keys[0], b"the page of the other engine")
        pages = PageWrites(CODEC, keys, full_frames(CODEC, keys), None, soon())
        RedisWrites(driver_of(backend, RedisDriver)._context, pages).move(range(2))
        assert pages.finish() == [PRESENT, STORED]
        assert store.read(keys[0]) == b"the page of the other engine"
        assert load(store, keys[1:]) == [HIT]


@pytest.mark.parametrize("ttl_s", [None, 900.0])
def test_reads_and_repeated_stores_are_uses_and_lookups_are_not(valkey: ValkeyServer, ttl_s: float | None) -> None:
    """A use renews the recency of a page, and its time to live."""
    keys = make_keys(3)
    with opened(valkey, ttl=ttl_s) as (backend, store), valkey.client() as client:
        names = [name_of(backend, key) for key in keys]
        store_chain(store, keys)
        if ttl_s is None:
            grow_old(client, names)
        for name in names if ttl_s is not None else ():
            assert 800 < client.ttl(name) <= 900
            client.expire(name, 50)
        assert load(store, keys[:1]) == [HIT]
        assert store_chain(store, keys[1:2]) == [PRESENT]
        assert backend.batch_exists(keys, deadline=soon()) == 3
        used = [client.object("idletime", name) < 1000 if ttl_s is None else client.ttl(name) > 800 for name in names]
        assert used == [True, True, False]


def test_a_lookup_is_one_round_trip(valkey: ValkeyServer) -> None:
    """For any number of pages: the server reads all requests at once, and a hole causes no further request."""
    keys = make_keys(500)
    with opened(valkey) as (backend, store), valkey.client() as client:
        store_chain(store, keys)
        store.backend.delete(keys[250:251], deadline=soon())
        before = client.info("commandstats")["cmdstat_exists"]["calls"]
        reads = client.info("stats").get("total_reads_processed", 0)
        assert backend.batch_exists(keys, deadline=soon()) == 250
        assert client.info("commandstats")["cmdstat_exists"]["calls"] == before + 500
        # A server reads 16 KiB at a time: five reads for the lookup, and a few for the test's own commands.
        assert client.info("stats")["total_reads_processed"] - reads < 12


def test_replicas_serve_reads_and_the_primary_takes_writes(redis_sentinel: RedisSentinel, unique_prefix: str) -> None:
    keys = make_keys(4)
    _, options = redis_sentinel.storage(key_prefix=unique_prefix, read_from="replica")
    with redis_sentinel.primary.client() as primary, redis_sentinel.replica.client() as replica:
        store = open_on(primary, options)
        backend = store.backend
        assert store_chain(store, keys) == [STORED] * 4
        wait_for(lambda: backend.batch_exists(keys, deadline=soon()) == 4)
        gets = primary.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
        assert load(store, keys) == [HIT] * 4
        assert primary.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"] == gets
        assert replica.info("commandstats")["cmdstat_get"]["calls"] >= 4
        # Damaged pages are removed on the primary, because replicas are read-only.
        assert isinstance(backend, Store)
        store.write(keys[1], b"damaged")
        wait_for(lambda: replica.get(name_of(backend, keys[1])) == b"damaged")
        assert load(store, keys)[1] == "corrupt"
        assert primary.get(name_of(backend, keys[1])) is None
        backend.close()


def test_usage_has_the_capacity_of_the_server(valkey: ValkeyServer) -> None:
    with opened(valkey) as (backend, _):
        assert backend.usage().capacity_bytes is None
    with ValkeyServer(maxmemory_bytes=64 << 20) as limited, opened(limited) as (backend, _):
        assert backend.usage().capacity_bytes == 64 << 20


def test_usage_counts_only_the_keys_of_pages(valkey: ValkeyServer) -> None:
    """Keys of other users of the server, each with one property that the keys of pages do not have."""
    keys = make_keys(3)
    with opened(valkey, key_prefix="ours:") as (backend, store), valkey.client() as client:
        store_chain(store, keys[:2])
        name = name_of(backend, keys[2])
        for foreign in (name.replace("ours", "away"), name[:-1], name + "0", name.upper().replace("OURS", "ours")):
            client.set(foreign, b"of another user")
        assert backend.usage() == Usage(2, 2 * PAGE, None)
        client.set(name, b"a page")
        assert backend.usage() == Usage(3, 2 * PAGE + 6, None)


def test_usage_of_a_large_server_is_estimated(valkey: ValkeyServer) -> None:
    """Beyond a few thousand keys it uses a sample, at a constant cost."""
    with ValkeyServer() as server, opened(server) as (backend, store), server.client() as client:
        head = f"{driver_of(backend, RedisDriver).options.key_prefix}{CODEC.namespace.hex()}:"
        for start in range(0, 20_000, 5_000):
            with client.pipeline(transaction=False) as pipe:
                for number in range(start, start + 5_000):
                    pipe.set(f"{head}{number:064x}", b"x" * 10)
                    pipe.set(f"somebody else's {number}", b"y" * 99)
                pipe.execute()
        found = store.backend.usage()
        assert 18_000 < found.pages < 22_000
        assert found.bytes == found.pages * 10
        assert client.info("commandstats")["cmdstat_scan"]["calls"] < 12


def test_pages_are_one_string_each_under_a_readable_key(valkey: ValkeyServer) -> None:
    (key,) = make_keys(1)
    with opened(valkey, key_prefix="cache/1:") as (_, store), valkey.client() as client:
        store_chain(store, [key])
        name = f"cache/1:{CODEC.namespace.hex()}:{key.hex()}"
        assert client.strlen(name) == PAGE
        assert load(store, [key]) == [HIT] and client.ttl(name) == -1, "without a time to live pages do not expire"
        store.backend.delete([key], deadline=soon())
