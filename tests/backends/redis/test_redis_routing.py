"""Clusters that change under a store: slots that have moved, are migrating, or are unassigned."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.redis import RedisDriver
from hicache.backends.redis.channel import Reply
from hicache.backends.redis.errors import ErrorReply
from hicache.backends.redis.options import open_access
from hicache.backends.redis.routing import Server, parse_slots, redirect
from hicache.config.addresses import Address
from hicache.config.redis_storage import RedisStorageOptions
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    MISS,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    driver_of,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache_lab.devservers import RedisCluster
from hicache_lab.devservers.ports import LOOPBACK
from tests.waiting import wait_for

from .store import fresh_prefix, name_of, open_on, opened


@pytest.fixture
def store(own_cluster: RedisCluster) -> Iterator[Subject]:
    with redis.RedisCluster("127.0.0.1", own_cluster.nodes[0].port) as client:
        store = open_on(client, own_cluster.storage(key_prefix=fresh_prefix())[1])
        yield store
        store.backend.close()


class Slot:
    """The slot of one page, and its migration to another node."""

    def __init__(self, cluster: RedisCluster, store: Subject, key: bytes) -> None:
        self._clients = [node.client() for node in cluster.nodes]
        self._ports = [node.port for node in cluster.nodes]
        self._ids = [str(client.execute_command("CLUSTER", "MYID"), "ascii") for client in self._clients]
        self.name: str = name_of(store.backend, key)  # type: ignore[arg-type]
        self.slot = key_slot(self.name.encode())
        self.source = next(i for i, client in enumerate(self._clients) if self._serves(client))
        self.target = (self.source + 1) % len(self._clients)

    def _serves(self, client: Any) -> bool:
        try:
            client.exists(self.name)
        except redis.exceptions.MovedError:
            return False
        return True

    def unassign(self) -> None:
        """Take the slot from every node, from its owner first: each heartbeat of the owner gives it back to the
        others, also one that was on its way."""
        for i in (self.source, *range(len(self._clients))):
            wait_for(functools.partial(self._is_deleted, self._clients[i]))

    def _is_deleted(self, client: Any) -> bool:
        ranges = client.execute_command("CLUSTER", "SLOTS")
        if any(int(first) <= self.slot <= int(last) for first, last, *_ in ranges):
            client.execute_command("CLUSTER", "DELSLOTS", self.slot)
            return False
        return True

    def open(self) -> None:
        """Begin the migration: the source redirects requests for missing keys to the target."""
        source, target = self._ids[self.source], self._ids[self.target]
        self._clients[self.target].execute_command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", source)
        self._clients[self.source].execute_command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", target)

    def carry(self) -> None:
        """Move the keys."""
        source = self._clients[self.source]
        for name in source.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1000):
            source.execute_command("MIGRATE", "127.0.0.1", self._ports[self.target], name, 0, 5000)

    def end(self) -> None:
        """End the migration: notify all nodes."""
        target = self._ids[self.target]
        for i in (self.target, self.source, *range(len(self._clients))):
            self._clients[i].execute_command("CLUSTER", "SETSLOT", self.slot, "NODE", target)
        for client in self._clients:
            client.close()


@pytest.mark.parametrize("verb", ["exists", "get", "set", "delete"])
def test_each_verb_follows_a_slot_that_moved(own_cluster: RedisCluster, store: Subject, verb: str) -> None:
    keys = make_keys(20, verb)
    store_chain(store, keys)
    slot = Slot(own_cluster, store, keys[3])
    slot.open()
    slot.carry()
    slot.end()
    backend = store.backend
    if verb == "exists":
        assert backend.batch_exists(keys, deadline=soon()) == 20
    elif verb == "get":
        assert load(store, keys) == [HIT] * 20
    elif verb == "set":
        assert store_chain(store, keys) == [PRESENT] * 20
    else:
        assert backend.delete(keys, deadline=soon()) == 20
    assert dict(backend.statistics().errors) == {}


def test_pages_of_a_migrating_slot_are_found_on_both_nodes(own_cluster: RedisCluster, store: Subject) -> None:
    keys = make_keys(20, "moving")
    store_chain(store, keys[:19])
    slot = Slot(own_cluster, store, keys[5])
    slot.open()
    slot.carry()
    backend = store.backend
    assert load(store, keys) == [HIT] * 19 + [MISS]
    assert backend.batch_exists(keys, deadline=soon()) == 19
    backend.delete([keys[5]], deadline=soon())
    assert store_chain(store, keys) == [PRESENT] * 5 + [STORED] + [PRESENT] * 13 + [STORED]
    assert load(store, keys) == [HIT] * 20
    assert dict(backend.statistics().errors) == {}
    slot.end()


def test_an_unassigned_slot_costs_its_pages(own_cluster: RedisCluster, store: Subject) -> None:
    keys = make_keys(20, "gone")
    store_chain(store, keys)
    slot = Slot(own_cluster, store, keys[4])
    backend = store.backend
    slot.unassign()
    try:
        assert load(store, keys) == [HIT] * 4 + [GET_ERROR] + [HIT] * 15
        assert backend.batch_exists(keys, deadline=soon()) == 4
        assert store_chain(store, keys) == [PRESENT] * 4 + [SET_ERROR] + [PRESENT] * 15
        assert dict(backend.statistics().errors) == {"node_down": 3}
    finally:
        slot._clients[slot.target].execute_command("CLUSTER", "ADDSLOTS", slot.slot)
        slot.end()


def test_routes_are_requested_from_nodes_that_have_not_failed_recently(own_cluster: RedisCluster) -> None:
    """A hanging node would cost a timeout each time."""
    failed = own_cluster.nodes[1]
    with opened(own_cluster) as (backend, _), failed.client() as client:
        router = driver_of(backend, RedisDriver)._context.router

        def asked() -> int:
            return int(client.info("commandstats").get("cmdstat_cluster|slots", {"calls": 0})["calls"])

        before = asked()
        failed.pause()
        try:
            for _ in range(20):
                router.note(ErrorKind.TIMEOUT, Server(Address(LOOPBACK, failed.port)))
                router.routes(soon())
        finally:
            failed.resume()
        assert asked() == before


@pytest.fixture(scope="module")
def pair() -> Iterator[RedisCluster]:
    """A cluster of one primary and its replica."""
    with RedisCluster(primaries=1, replicas=1) as cluster:
        yield cluster


def test_replicas_of_a_cluster_serve_reads(pair: RedisCluster) -> None:
    keys = make_keys(8)
    primary, replica = pair.nodes
    with opened(pair, read_from="replica") as (backend, store):
        assert store_chain(store, keys) == [STORED] * 8
        wait_for(lambda: backend.batch_exists(keys, deadline=soon()) == 8)
        assert load(store, keys) == [HIT] * 8
        assert dict(backend.statistics().errors) == {}
    with primary.client() as there, replica.client() as here:
        assert "cmdstat_get" not in there.info("commandstats")
        assert here.info("commandstats")["cmdstat_get"]["calls"] == 8


def test_after_a_failover_the_nodes_name_the_new_primary(pair: RedisCluster) -> None:
    keys = make_keys(8)
    primary, replica = pair.nodes
    with opened(pair) as (_, store), primary.client() as there, replica.client() as here:
        store_chain(store, keys)
        there.wait(1, 5000)
        here.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        wait_for(lambda: there.info("replication")["role"] == "slave")
        # The old primary redirects to the new one, which is not an error.
        assert load(store, keys) == [HIT] * 8
        assert store_chain(store, make_keys(8, "new")) == [STORED] * 8
        assert dict(store.backend.statistics().errors) == {}
        primary.kill()
        assert load(store, keys) == [HIT] * 8


ASKED = Address("asked", 7000)
ACCESS = open_access(RedisStorageOptions(cluster=["asked:7000"]))


def test_cluster_slots_is_parsed_in_all_its_forms() -> None:
    reply: Reply = [
        [0, 99, [b"one", 7001, b"id"], [b"two", 7002, b"id", []]],
        [100, 16000, [b"", 7003, b"id"], [None, 7004, b"id"], [b"?", 7005, b"id"]],
        [16001, 16383, [b"", 7003, b"id"], [b"?", 7005, b"id"], [None, 7004, b"id"]],
    ]
    routes = parse_slots(reply, ASKED, ACCESS)
    assert routes.addresses() == {
        Address("one", 7001), Address("two", 7002), Address("asked", 7003), Address("asked", 7004),
        Address("asked", 7005),
    }
    assert len(routes.shards) == 2
    assert list(routes.slots) == [0] * 100 + [1] * (SLOTS - 100)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ([], ErrorKind.CLUSTER_DOWN),
        (None, ErrorKind.CLUSTER_DOWN),
        ([[0, 99]], ErrorKind.PROTOCOL),
        ([[0, 16384, [b"one", 7001]]], ErrorKind.PROTOCOL),
        ([[5, 4, [b"one", 7001]]], ErrorKind.PROTOCOL),
        ([[0, 1, [7001]]], ErrorKind.PROTOCOL),
        ([[0, 1, b"one"]], ErrorKind.PROTOCOL),
        ([7], ErrorKind.PROTOCOL),
    ],
)
def test_an_invalid_reply_to_cluster_slots_is_refused(reply: Reply, kind: ErrorKind) -> None:
    with pytest.raises(StoreError) as raised:
        parse_slots(reply, ASKED, ACCESS)
    assert raised.value.kind is kind


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (b"MOVED 3999 127.0.0.1:6381", Address("127.0.0.1", 6381)),
        (b"ASK 3999 :6381", Address("asked", 6381)),
        (b"MOVED 3999 [::1]:6381", Address("::1", 6381)),
        (b"MOVED 3999 ::1:6381", Address("::1", 6381)),
        (b"MOVED 3999 host", None),
        (b"MOVED", None),
        (b"MOVED 3999 host:123456", None),
    ],
)
def test_redirections_are_parsed(text: bytes, target: Address | None) -> None:
    assert redirect(ErrorReply(text), ASKED) == target
