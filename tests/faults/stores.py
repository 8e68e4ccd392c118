"""The stores of the fault matrix: each is a real server behind a proxy, with a second, direct connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.storage import Storage
from hicache.config.guard import GuardConfig
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE
from hicache_lab.devservers import DevServer, RedisServer, SeaweedServer, ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK
from tests.proxy import Proxy
from tests.tuned import tuned
from tests.waiting import wait_until_made

# Larger than the buffers of sockets and proxy, so that a cut or a stall in the middle of a page affects the page.
PAYLOAD_BYTES = 3 << 20
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
# The timeout where a store must fail: short enough for hundreds of cells. A busy machine may answer too late, so
# operations that must succeed are retried or use the other timeout.
TIMEOUT_S = 0.3
# The timeout where a store must succeed, even on a busy machine.
PATIENCE_S = 30.0
# A breaker that opens after two failures and recovers within a fifth of a second.
QUICK = {"failures": 2, "backoff_min": 0.05, "backoff_max": 0.2, "probe_timeout": 5.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of server, and the options with which a backend reaches it through another port."""

    name: str
    server: Callable[[], DevServer]
    through: Callable[[int], dict[str, Any]]
    keeps_data: bool  # True if its pages survive a restart


def _redis(port: int) -> dict[str, Any]:
    return {"url": f"redis://{LOOPBACK}:{port}", "connections": 3}


def _s3(port: int) -> dict[str, Any]:
    return {"endpoint_url": f"http://{LOOPBACK}:{port}", "connections": 3}


KINDS = (
    Kind("valkey", ValkeyServer, _redis, keeps_data=False),
    Kind("redis", RedisServer, _redis, keeps_data=False),
    Kind("s3", SeaweedServer, _s3, keeps_data=True),
)


class Hurt:
    """A server of one kind behind a proxy. `far` connects through the proxy, `near` directly."""

    def __init__(self, kind: Kind, server: DevServer, proxy: Proxy) -> None:
        self.kind = kind
        self.server = server
        self.proxy = proxy

    @contextmanager
    def far(
        self, *, timeout_s: float = TIMEOUT_S, guard: dict[str, Any] | None = None
    ) -> Iterator[Storage]:
        """Open a backend through the proxy; with `guard`, behind a guard with these options."""
        type_name, options = self.server.storage(timeout=timeout_s, **self.kind.through(self.proxy.port))
        yield from _opened(BackendSpec(type_name, options, None if guard is None else tuned(GuardConfig, **guard)))

    @contextmanager
    def near(self) -> Iterator[Storage]:
        """Open a backend that connects directly to the server."""
        type_name, options = self.server.storage(timeout=PATIENCE_S)
        yield from _opened(BackendSpec(type_name, options, None))


def _opened(spec: BackendSpec) -> Iterator[Storage]:
    backend = wait_until_made(lambda: open_spec(spec, CODEC), BackendUnavailable)  # there is no fault so far
    try:
        yield backend
    finally:
        backend.close()
