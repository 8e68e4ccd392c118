"""Groups of Valkey servers: a cluster, and a primary with a replica and a sentinel."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hicache.errors import BackendUnavailable

from .base import ServerGroup, Storage
from .ports import LOOPBACK
from .redis import RedisLike, ValkeyServer, import_redis

_SLOTS = 16384
# A few seconds are normal; a busy machine needs many more.
_TOGETHER_TIMEOUT_S = 60.0
_POLL_S = 0.05
# After this time a primary that does not answer its sentinel is considered dead. Short, so that a fail-over takes a
# second or two.
_DOWN_AFTER_MS = 1000
# The same for the nodes of a cluster, which have no such fail-over: Valkey's default. With less, a node that a busy
# machine runs late loses its slots for a while.
_NODE_TIMEOUT_MS = 15000


def _wait(condition: Callable[[], bool], what: str) -> None:
    redis = import_redis()
    deadline_s = time.monotonic() + _TOGETHER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if condition():
                return
        except redis.RedisError:
            pass  # still starting
        time.sleep(_POLL_S)
    raise BackendUnavailable(f"{what} within {_TOGETHER_TIMEOUT_S:g} s")


class GroupMember(ValkeyServer):
    """A server of a group. It is killed at the end: it has no data on disk, and the grace periods would add up."""

    grace_s: ClassVar[float] = 0.0


class ClusterNode(GroupMember):
    """A node of a cluster, not yet connected to the other nodes. Its bus port is also chosen here."""

    name: ClassVar[str] = "valkey cluster node"
    port_names: ClassVar[tuple[str, ...]] = ("port", "bus_port")

    def _lines(self) -> list[str]:
        return [
            *super()._lines(),
            "cluster-enabled yes",
            "cluster-config-file nodes.conf",
            f"cluster-port {self.ports['bus_port']}",
            f"cluster-node-timeout {_NODE_TIMEOUT_MS}",
            # A dead node makes only its own slots unavailable.
            "cluster-require-full-coverage no",
        ]


class RedisCluster(ServerGroup):
    """`primaries` Valkey nodes with equal numbers of slots, each with `replicas` copies.

    Invariant: `nodes` lists the primaries first, then the replicas of the first, of the second, and so on.
    """

    def __init__(self, *, primaries: int = 3, replicas: int = 0, password: str | None = None) -> None:
        self._primaries = primaries
        self._replicas = replicas
        self.nodes = [ClusterNode(password=password) for _ in range(primaries * (1 + replicas))]
        self.servers = self.nodes

    def unite(self) -> None:
        self._share_slots()
        self._meet()
        self._make_replicas()
        _wait(lambda: all(map(self._is_whole, self.nodes)), "redis cluster: the nodes did not form a cluster")

    def _share_slots(self) -> None:
        borders = [_SLOTS * i // self._primaries for i in range(self._primaries + 1)]
        for node, first, after in zip(self.nodes, borders, borders[1:], strict=False):
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)

    def _meet(self) -> None:
        with self.nodes[0].client() as client:
            for node in self.nodes[1:]:
                client.execute_command("CLUSTER", "MEET", LOOPBACK, node.port, node.ports["bus_port"])
        count = len(self.nodes)
        _wait(lambda: all(self._knows(node) == count for node in self.nodes), "redis cluster: the nodes did not meet")

    def _make_replicas(self) -> None:
        for i, replica in enumerate(self.nodes[self._primaries :]):
            with self.nodes[i // self._replicas].client() as client:
                primary = client.execute_command("CLUSTER", "MYID")
            with replica.client() as client:
                # An error until the node has learned the name of the other.
                _wait(
                    functools.partial(client.execute_command, "CLUSTER", "REPLICATE", primary),
                    "redis cluster: a replica did not find its primary",
                )

    @staticmethod
    def _knows(node: RedisLike) -> int:
        with node.client() as client:
            return int(client.cluster("INFO")["cluster_known_nodes"])

    def _is_whole(self, node: RedisLike) -> bool:
        with node.client() as client:
            state = client.cluster("INFO")
            replication = client.info("replication")
            parts = client.execute_command("CLUSTER", "SLOTS")
        whole = state["cluster_state"] == "ok" and int(state["cluster_slots_ok"]) == _SLOTS
        # A node lists a replica once it has heard how far that has copied.
        whole = whole and all(len(nodes) == 1 + self._replicas for _first, _last, *nodes in parts)
        is_replica = node in self.nodes[self._primaries :]
        return whole and (not is_replica or replication.get("master_link_status") == "up")

    def storage(self, **extra: Any) -> Storage:
        addresses = [f"{LOOPBACK}:{node.port}" for node in self.nodes]
        return "redis", {"cluster": addresses, **self.nodes[0].login_options(), **extra}

    def environ(self) -> dict[str, str]:
        return self.nodes[0].environ()


class SentinelServer(GroupMember):
    """Watches `primary` under the name `service`, and promotes its replica when it fails."""

    name: ClassVar[str] = "valkey sentinel"
    flags: ClassVar[tuple[str, ...]] = ("--sentinel",)

    def __init__(self, primary: RedisLike, service: str) -> None:
        super().__init__()
        self._primary = primary
        self._service = service

    def _lines(self) -> list[str]:
        service = self._service
        lines = [
            f"bind {LOOPBACK}",
            f"port {self.port}",
            f'dir "{self.data}"',
            f"sentinel monitor {service} {LOOPBACK} {self._primary.port} 1",
            f"sentinel down-after-milliseconds {service} {_DOWN_AFTER_MS}",
            f"sentinel failover-timeout {service} 3000",
        ]
        if self._primary.password is not None:
            lines.append(f"sentinel auth-pass {service} {self._primary.password}")
        return lines

    def replicas(self) -> int:
        """Return the number of healthy replicas that it knows."""
        with self.client() as client:
            found = client.sentinel_slaves(self._service)
        return sum(not (replica["is_disconnected"] or replica["is_sdown"]) for replica in found)


class RedisSentinel(ServerGroup):
    """A primary, its replica and one sentinel: enough to test a fail-over, not for production."""

    service = "hicache"

    def __init__(self, *, password: str | None = None) -> None:
        self.primary: ValkeyServer = GroupMember(password=password)
        self.replica: ValkeyServer = GroupMember(password=password, replica_of=self.primary)
        self.sentinel = SentinelServer(self.primary, self.service)
        self.nodes: Sequence[RedisLike] = (self.primary, self.replica, self.sentinel)
        self.servers = self.nodes

    def unite(self) -> None:
        _wait(lambda: self.sentinel.replicas() == 1, "redis sentinel: the replica was not found")

    def storage(self, **extra: Any) -> Storage:
        options = {"sentinels": [f"{LOOPBACK}:{self.sentinel.port}"], "service": self.service}
        return "redis", {**options, **self.primary.login_options(), **extra}

    def environ(self) -> dict[str, str]:
        return self.primary.environ()
