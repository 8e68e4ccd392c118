"""Servers that hang, die, restart empty or cut replies, and slow networks: errors in time, then recovery."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache.backends.guard import CONFIRM_S, HealthState
from hicache.backends.redis import RedisDriver
from hicache.backends.redis.routing import _ASK_AGAIN_S
from hicache.backends.store import Store
from hicache.backends.stored import StoredPages
from hicache.config.redis_storage import RedisStorageOptions
from hicache.frame import FrameCodec, PageBuffer
from hicache.units import MIB
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache_lab.devservers import RedisCluster, RedisSentinel, ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import WAIT_S, wait_for

from .store import CODEC, PAGE, fresh_prefix, open_on, opened

# Short, so that tests of hanging servers are fast, but long enough for a server on a busy machine.
TIMEOUT_S = 0.5
# For tests in which nothing hangs, so nothing waits this long.
PATIENT_S = 20.0
FOREVER = float("inf")


def errors_of(store: Subject) -> dict[str, int]:
    return dict(store.backend.statistics().errors)


def all_verbs(store: Subject, keys: list[bytes], seconds: float) -> None:
    """Call every verb on a server that does not answer: only errors, no exceptions."""
    frames = full_frames(CODEC, keys)
    backend = store.backend
    assert backend.batch_exists(keys, deadline=time.monotonic() + seconds) == 0
    assert backend.batch_get(keys, frames, deadline=time.monotonic() + seconds) == [GET_ERROR] * len(keys)
    assert backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + seconds) == [SET_ERROR] * len(keys)
    assert backend.delete(keys, deadline=time.monotonic() + seconds) == 0
    assert backend.clear(deadline=time.monotonic() + seconds) == 0


@pytest.mark.parametrize("limit", ["deadline", "timeout"])
def test_calls_on_a_stopped_server_end_in_time(limit: str) -> None:
    """Each verb returns while the server is still stopped, by the call's deadline or by `timeout`."""
    keys = make_keys(12)
    with ValkeyServer() as server:
        timeout_s, seconds = (PATIENT_S, TIMEOUT_S) if limit == "deadline" else (TIMEOUT_S, FOREVER)
        with opened(server, timeout=timeout_s) as (backend, store):
            store_chain(store, keys)
            server.pause()
            try:
                all_verbs(store, keys, seconds)
                if limit == "timeout":
                    assert backend.usage().pages == 0  # the last known value
            finally:
                server.resume()
            assert set(errors_of(store)) <= {limit, "timeout"}
            assert errors_of(store)[limit] >= 3 * len(keys)
            assert backend.batch_exists(keys, deadline=soon()) in (0, 12)  # the server may have got the deletion
            assert store_chain(store, keys) in ([STORED] * 12, [PRESENT] * 12)
            assert load(store, keys) == [HIT] * 12


@pytest.mark.parametrize("end", [Proxy.drop, Proxy.forget], ids=["closed", "forgotten"])
def test_dead_idle_connections_are_replaced_silently(valkey: ValkeyServer, end: Callable[[Proxy], None]) -> None:
    """For any number of them. If the network forgot them, only a request shows that they are dead."""
    keys = make_keys(40)
    with Proxy(valkey.port) as relay, valkey.client() as client:
        options = {"url": f"redis://{LOOPBACK}:{relay.port}", "key_prefix": fresh_prefix(), "connections": 8}
        store = open_on(client, options)
        for verb in (lambda: store_chain(store, keys), lambda: load(store, keys),
                     lambda: store.backend.batch_exists(keys, deadline=soon())):
            threads = [threading.Thread(target=load, args=(store, keys)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            before = relay.connections
            end(relay)
            verb()
            assert relay.connections > before
            assert errors_of(store) == {}
        assert load(store, keys) == [HIT] * 40
        assert store.backend.usage().pages == 40
        with contextlib.closing(StoredPages(RedisDriver(None, RedisStorageOptions(**options)), "redis")) as raw:
            for _ in range(2):
                pages = list(raw.pages())
                end(relay)
                assert len(list(raw.pages())) == 40
                end(relay)
                assert raw.read(pages[0], PAGE) == store.read(pages[0].key)
                end(relay)
                assert not raw.write(pages[0], b"x", None)
                end(relay)
                assert store.backend.usage().pages == 40
            end(relay)
            assert raw.remove(pages) == 40
        assert errors_of(store) == {}
        store.backend.close()


@pytest.mark.parametrize("idle_s", [2.0, 600.0])
def test_connections_that_a_network_forgot_silently_cost_no_page(valkey: ValkeyServer, idle_s: float) -> None:
    """An old idle connection is not used. After a short gap, a connection gets a moment for its first reply."""
    keys, clock = make_keys(12), ManualClock()
    with Proxy(valkey.port) as relay, valkey.client() as client:
        options = {"url": f"redis://{LOOPBACK}:{relay.port}", "key_prefix": fresh_prefix(), "timeout": PATIENT_S}
        store = open_on(client, options, clock=clock)
        backend, frames = store.backend, full_frames(CODEC, keys)
        assert load(store, keys[:1]) + store_chain(store, keys) == [MISS] + [STORED] * 12
        relay.forget(silently=True)
        clock.advance(idle_s)
        assert backend.batch_get(keys, frames, deadline=clock() + PATIENT_S) == [HIT] * 12
        assert backend.batch_set(keys, frames, parent=None, deadline=clock() + PATIENT_S) == [PRESENT] * 12
        assert backend.batch_exists(keys, deadline=clock() + PATIENT_S) == 12
        assert errors_of(store) == {}
        backend.close()


@contextlib.contextmanager
def proxied(server: ValkeyServer, timeout_s: float = PATIENT_S) -> Iterator[tuple[Subject, Proxy]]:
    with contextlib.ExitStack() as ending:
        proxy = ending.enter_context(Proxy(server.port))
        url = f"redis://127.0.0.1:{proxy.port}"
        yield ending.enter_context(opened(server, url=url, timeout=timeout_s))[1], proxy


# In the header of the reply, after it, in the body, before its end, and within the next reply.
@pytest.mark.parametrize("after", [0, 2, 6, 7, 300, PAGE, PAGE + 7, PAGE + 8, PAGE + 10, 3 * PAGE])
@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_reply_is_an_error_and_its_connection_is_not_reused(
    valkey: ValkeyServer, after: int, reset: bool
) -> None:
    keys = make_keys(6)
    with proxied(valkey) as (store, proxy):
        store_chain(store, keys)
        proxy.set(Faults(cut_after_bytes=after, reset=reset, direction=Direction.DOWN))
        outcomes = load(store, keys)  # asserts that each hit is the right page
        proxy.heal()
        assert set(outcomes) <= {HIT, GET_ERROR} and GET_ERROR in outcomes
        assert errors_of(store) == {"connection_lost": outcomes.count(GET_ERROR)}
        assert load(store, keys) == [HIT] * 6


def test_a_slow_network_with_progress_is_waited_for(valkey: ValkeyServer) -> None:
    """The whole transfer takes twice as long as the timeout, but each wait is shorter. The control: no progress."""
    keys = make_keys(4)
    with proxied(valkey, TIMEOUT_S) as (store, proxy):
        store_chain(store, keys)
        proxy.set(Faults(bytes_per_s=4 * PAGE / (2 * TIMEOUT_S), slice_bytes=512, direction=Direction.DOWN))
        assert load(store, keys) == [HIT] * 4
        assert errors_of(store) == {}
        proxy.set(Faults(stall=Direction.DOWN))
        assert load(store, keys) == [GET_ERROR] * 4
        assert errors_of(store) == {"timeout": 4}
        proxy.heal()
        assert load(store, keys) == [HIT] * 4


def test_a_hanging_cluster_node_costs_only_its_pages(own_cluster: RedisCluster) -> None:
    keys = make_keys(60)
    with opened(own_cluster, timeout=TIMEOUT_S) as (backend, store):
        assert store_chain(store, keys) == [STORED] * 60
        own_cluster.nodes[1].pause()
        try:
            found = load(store, keys)
            assert set(found) == {HIT, GET_ERROR}
            first = found.index(GET_ERROR)
            assert backend.batch_exists(keys, deadline=soon()) == first
        finally:
            own_cluster.nodes[1].resume()
        # It was stopped for so long that the other nodes may count it as failed; they accept it again soon.
        wait_for(lambda: load(store, keys) == [HIT] * 60)


class PassingClock(ManualClock):
    """A pause before a retry, on the thread of the test, passes at once: nobody else moves the time."""

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        if threading.current_thread() is threading.main_thread():
            self.advance(timeout_s)
        return super().wait_set(event, timeout_s)


@contextlib.contextmanager
def guarded(cluster: RedisCluster, clock: ManualClock, timeout_s: float) -> Iterator[tuple[Store, Subject]]:
    """Open a store on a cluster with its guard, and close it."""
    options = RedisStorageOptions(**cluster.storage(key_prefix=fresh_prefix(), timeout=timeout_s)[1])
    with contextlib.closing(Store(RedisDriver(CODEC, options, clock), CODEC, name="redis", clock=clock)) as backend:
        yield backend, Subject(backend, lambda key: None, lambda key, data: None)


@pytest.mark.parametrize("fault", ["dead", "hanging"])
def test_a_failed_cluster_node_neither_stops_nor_delays_the_store(own_cluster: RedisCluster, fault: str) -> None:
    """Its pages are errors that do not count as failures of the store. The verdict names it. Calls whose time is
    shorter than `timeout` find the node too, and later calls do not wait for it. Its pages are served again when it
    works."""
    keys, clock, node = make_keys(40), PassingClock(), own_cluster.nodes[1]
    with guarded(own_cluster, clock, PATIENT_S) as (backend, store):
        assert store_chain(store, keys) == [STORED] * 40
        node.kill() if fault == "dead" else node.pause()
        try:
            found = backend.batch_has(keys, deadline=soon(1.0))
            assert 1 < sum(found) < 40, "the pages of the other nodes"
            expected = [HIT if one else GET_ERROR for one in found]
            assert load(store, keys) == expected
            assert [load(store, [key])[0] for key in keys] == expected, "also calls that need only this node"
            new = make_keys(40, "new")
            assert {store_chain(store, [key])[0] for key in new} == {STORED, SET_ERROR}
            assert backend.batch_exists(keys, deadline=soon()) == found.index(False)
            clock.advance(CONFIRM_S)
            health = backend.health()
            assert health.state is HealthState.PARTLY
            assert f"1 of 3 nodes of the cluster cannot be used: {LOOPBACK}:{node.port} (" in health.what
            guard = backend.guard_statistics()
            assert not any(guard.failures.values())
            assert not any(one.opens for one in guard.breakers.values())
            assert backend.usage().pages == sum(found) + sum(backend.batch_has(new, deadline=clock() + PATIENT_S))
        finally:
            node.restart() if fault == "dead" else node.resume()
        # Its pages were in its memory.
        here = [one or fault == "hanging" for one in found]

        def works() -> bool:
            clock.advance(_ASK_AGAIN_S)
            is_whole = backend.health().state is HealthState.WORKING
            return is_whole and backend.batch_has(keys, deadline=clock() + PATIENT_S) == here

        wait_for(works)


def test_the_pages_of_a_dead_node_are_served_by_the_replica_that_takes_over() -> None:
    keys, clock = make_keys(20), PassingClock()
    with RedisCluster(primaries=2, replicas=1) as cluster, guarded(cluster, clock, PATIENT_S) as (backend, store):
        store_chain(store, keys)
        with cluster.nodes[0].client() as primary, cluster.nodes[2].client() as replica:
            primary.wait(1, 5000)
            cluster.nodes[0].kill()
            assert set(load(store, keys)) == {HIT, GET_ERROR}
            replica.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

            def serves() -> bool:
                clock.advance(_ASK_AGAIN_S)
                return backend.batch_has(keys, deadline=clock() + PATIENT_S) == [True] * 20

            wait_for(serves)
        assert backend.health().state is HealthState.WORKING


def test_after_a_failover_the_sentinels_name_the_new_primary() -> None:
    keys = make_keys(6)
    with RedisSentinel() as group, group.primary.client() as client:
        store = open_on(client, group.storage(key_prefix=fresh_prefix(), timeout=TIMEOUT_S)[1])
        try:
            store_chain(store, keys)
            client.wait(1, 1000)
            group.primary.kill()
            wait_for(lambda: store_chain(store, keys[:1]) in ([STORED], [PRESENT]))
            assert load(store, keys) == [HIT] * 6
            assert store_chain(store, make_keys(3, "new")) == [STORED] * 3
        finally:
            store.backend.close()


def test_reads_avoid_a_dead_replica() -> None:
    keys = make_keys(6)
    with RedisSentinel() as group, group.primary.client() as client:
        replicas = [f"{LOOPBACK}:{group.replica.port}"]
        _, options = group.primary.storage(key_prefix=fresh_prefix(), read_from="replica", replicas=replicas)
        clock = ManualClock()
        store = open_on(client, options, clock=clock)
        try:
            store_chain(store, keys)
            wait_for(lambda: store.backend.batch_exists(keys, deadline=soon()) == 6)
            group.replica.kill()
            assert load(store, keys) == [GET_ERROR] * 6
            assert load(store, keys) == [HIT] * 6  # from the primary
            clock.advance(1.0)  # the thread has asked the replica a moment ago
            assert load(store, keys) == [HIT] * 6
            assert errors_of(store) == {"connection_refused": 6}
            group.replica.restart()
            with group.replica.client() as replica:

                def serves() -> bool:
                    clock.advance(_ASK_AGAIN_S)
                    assert store.backend.batch_has(keys, deadline=clock() + PATIENT_S) == [True] * 6
                    return "cmdstat_exists" in replica.info("commandstats")

                wait_for(serves)
        finally:
            store.backend.close()


def test_a_bug_on_one_connection_is_one_error_for_each_of_its_pages(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = FrameCodec(NAMESPACE, MIB)
    with opened(valkey, codec) as (backend, store):
        keys = make_keys(8)
        store_chain(store, keys)
        buffers, other_lane = codec.buffers, threading.Event()

        def broken(page: PageBuffer) -> list[memoryview]:
            if threading.current_thread().name.startswith("hicache-redis"):
                other_lane.set()
                raise ValueError
            other_lane.wait(WAIT_S)  # so that the second lane gets a page too
            return buffers(page)

        monkeypatch.setattr(codec, "buffers", broken)
        outcomes = load(store, keys)
        assert GET_ERROR in outcomes
        assert backend.statistics().errors == {"internal": outcomes.count(GET_ERROR)}
