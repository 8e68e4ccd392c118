"""The stores of the fault matrix: each a real server behind a proxy, and a straight way to it beside the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hicache.backends.base import StorageBackend
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.testing import NAMESPACE
from hicache.devservers import DevServer, RedisServer, SeaweedServer, ValkeyServer
from hicache.devservers.ports import LOOPBACK
from hicache.frame import FrameCodec
from tests.proxy import Proxy

# Larger than what sockets and the proxy hold, so that a cut or a stall in the middle of a page meets the page there.
PAYLOAD_BYTES = 3 << 20
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
# Far longer than any of the servers needs for an answer, and short enough for hundreds of cells.
TIMEOUT_S = 0.3
# Opens after two failures and heals within a fifth of a second.
QUICK = {"failures": 2, "backoff_min_s": 0.05, "backoff_max_s": 0.2, "probe_timeout_s": 5.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """A server, and how a backend is told to reach it through another port."""

    name: str
    server: Callable[[], DevServer]
    through: Callable[[int], dict[str, Any]]
    keeps_data: bool  # whether its pages outlive its process


def _redis(port: int) -> dict[str, Any]:
    return {"url": f"redis://{LOOPBACK}:{port}", "connections": 2}


def _s3(client: str) -> Callable[[int], dict[str, Any]]:
    return lambda port: {"endpoint_url": f"http://{LOOPBACK}:{port}", "client": client, "connections": 2}


KINDS = (
    Kind("valkey", ValkeyServer, _redis, keeps_data=False),
    Kind("redis", RedisServer, _redis, keeps_data=False),
    Kind("s3", SeaweedServer, _s3("direct"), keeps_data=True),
    Kind("s3 by boto3", SeaweedServer, _s3("boto3"), keeps_data=True),
)


class Hurt:
    """A server of one kind behind a proxy. `far` goes through the proxy, `near` does not."""

    def __init__(self, kind: Kind, server: DevServer, proxy: Proxy) -> None:
        self.kind = kind
        self.server = server
        self.proxy = proxy

    @contextmanager
    def far(self, *, guard: dict[str, object] | None = None) -> Iterator[StorageBackend]:
        """A backend that reaches the server through the proxy; with `guard`, behind a guard with these options."""
        type_name, options = self.server.storage(timeout_s=TIMEOUT_S, **self.kind.through(self.proxy.port))
        yield from _opened(BackendSpec(type_name, options, guard))

    @contextmanager
    def near(self) -> Iterator[StorageBackend]:
        """A backend that goes to the server straight."""
        type_name, options = self.server.storage(timeout_s=10.0)
        yield from _opened(BackendSpec(type_name, options, None))


def _opened(spec: BackendSpec) -> Iterator[StorageBackend]:
    backend = open_spec(spec, CODEC)
    try:
        yield backend
    finally:
        backend.close()
