"""A node opens namespaces without their stores, opens the stores in the background, and releases everything."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from hicache.backends.opening import StorageOpener
from hicache.backends.registry import BackendSpec
from hicache.backends.storage import Storage
from hicache.config import HiCacheConfig
from hicache.config.daemon import DaemonConfig
from hicache.daemon.namespace import ServedNamespace
from hicache.daemon.node import Node, pool_bytes_of
from hicache.daemon.protocol import OpenNamespace, Refused
from hicache.daemon.shared_slot import SharedSlot
from hicache.daemon.statistics import NamespaceStatistics
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache.host_memory import HostMemory
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    SET_ERROR,
    STORED,
    Subject,
    exists,
    load,
    make_keys,
    memory_store,
    store_chain,
)
from tests.backends._subjects import doorless
from tests.waiting import WAIT_S, wait_for

DIGEST = b"n" * 32
REQUEST = OpenNamespace(payload_bytes=5000)
REASON = "redis at cache.example: connection refused;\n start the server"


class Opener(StorageOpener):
    """Opens memory stores. Fails while `is_down`, and blocks while `gate` is not set. `clock` is that of the node."""

    def __init__(self, config: HiCacheConfig, clock: ManualClock) -> None:
        super().__init__(config, {})
        self.clock = clock
        self.is_down = False
        self.gate = threading.Event()
        self.gate.set()
        self.attempts = 0
        self.opened: list[Storage] = []

    def open(self, codec: FrameCodec, part: BackendSpec | None = None) -> Storage:
        """See StorageOpener."""
        self.attempts += 1
        self.gate.wait(WAIT_S)
        if self.is_down:
            raise BackendUnavailable(REASON)
        self.opened.append(memory_store(codec))
        return self.opened[-1]


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Node, Opener]]]:
    """A function that makes a node with a pool of this size and the opener of its stores."""
    with contextlib.ExitStack() as ends:

        def begin(pool: str = "1MiB", **daemon: object) -> tuple[Node, Opener]:
            config = HiCacheConfig.model_validate({"daemon": {"pool": pool, **daemon}, "storage": {"type": "memory"}})
            clock = ManualClock()
            node, opener = Node(config, {}, clock), Opener(config, clock)
            node.storage.opener = opener
            ends.callback(lambda: node.close(node.clock() + WAIT_S))
            ends.callback(opener.gate.set)
            return node, opener

        yield begin


def opened(node: Node, digest: bytes = DIGEST) -> ServedNamespace:
    return node.open(digest.hex(), REQUEST, node.clock() + WAIT_S)


def opened_late(node: Node, opener: Opener) -> ServedNamespace:
    """Open the namespace whose store hangs. Moves the clock by half of the caller's time, once the wait began."""
    waits, wait = threading.Event(), SharedSlot.wait

    def announced(slot: SharedSlot, deadline: float) -> None:
        waits.set()
        wait(slot, deadline)

    with mock.patch.object(SharedSlot, "wait", announced), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(opened, node)
        assert waits.wait(WAIT_S)
        opener.clock.advance(WAIT_S / 2)
        return opening.result(WAIT_S)


def as_store(namespace: ServedNamespace) -> Subject:
    return doorless(namespace.store)


def status(node: Node) -> NamespaceStatistics:
    (found,) = node.statistics().namespaces
    return found


def test_a_pool_may_be_a_share_of_the_available_memory(
    make: Callable[..., tuple[Node, Opener]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hicache")
    found = HostMemory(1 << 40, 20 << 20, None)
    monkeypatch.setattr("hicache.host_memory.host_memory", lambda *_: found)
    node, _ = make("12.5%")
    assert node.pool.capacity_bytes == node.statistics().pool.capacity_bytes == 2_621_440
    assert "daemon.pool: 12.5% of 20.0 MiB available = 2.5 MiB" in caplog.messages


def test_memory_for_pool_and_staging_that_is_not_available_is_refused_with_all_numbers(
    make: Callable[..., tuple[Node, Opener]]
) -> None:
    """The kernel would end the daemon in the middle of its start, which nobody could explain."""
    with pytest.raises(ConfigError, match=r"256.0 MiB for daemon.staging are needed.*lower daemon.pool to at most"):
        make("1024TiB")
    with pytest.raises(ConfigError, match=r"for daemon.pool .95%. and 1024.0 TiB for daemon.staging are needed"):
        pool_bytes_of(DaemonConfig.model_validate({"pool": "95%", "staging": "1024TiB"}))


def test_a_healthy_store_is_open_when_its_namespace_is(make: Callable[..., tuple[Node, Opener]]) -> None:
    node, opener = make()
    namespace = opened(node)
    assert namespace.store.stores == opener.opened[0].stores
    assert status(node).opening is None
    store_chain(as_store(namespace), make_keys(1))
    assert opener.opened[0].usage().pages == 1


def test_a_namespace_opens_without_its_store_and_uses_it_once_it_can_be_opened(
    make: Callable[..., tuple[Node, Opener]],
) -> None:
    node, opener = make()
    opener.is_down = True
    before_s = opener.clock.wall_s()
    store, keys = as_store(opened(node)), make_keys(3)
    assert (store_chain(store, keys[:2]), load(store, keys[:2])) == ([STORED] * 2, [HIT] * 2)
    wait_for(lambda: opener.attempts >= 3, lambda: opener.clock.advance(0.1))
    found = status(node).opening
    assert found is not None and found.attempts >= 2
    assert found.since_s == before_s
    assert found.error == "redis at cache.example: connection refused; start the server"
    opener.is_down = False
    wait_for(lambda: status(node).opening is None, lambda: opener.clock.advance(0.1))
    assert store_chain(store, keys) == [STORED] * 3, "the store has none of these pages yet"
    assert opener.opened[0].usage().pages == 3
    assert exists(store, keys) == 3


def test_opening_waits_for_a_store_that_hangs_for_half_of_the_callers_time(
    make: Callable[..., tuple[Node, Opener]],
) -> None:
    node, opener = make()
    opener.gate.clear()
    store, keys = as_store(opened_late(node, opener)), make_keys(2)
    assert (store_chain(store, keys), load(store, keys)) == ([STORED] * 2, [HIT] * 2)
    assert status(node).opening is None, "the first attempt has not failed yet"
    opener.gate.set()
    wait_for(lambda: len(node.namespaces()[0].store.stores) == 1)


def test_without_a_pool_calls_fail_until_the_store_is_open(make: Callable[..., tuple[Node, Opener]]) -> None:
    node, opener = make("0B")
    opener.is_down = True
    store, keys = as_store(opened(node)), make_keys(2)
    errors = list[str]()
    assert (exists(store, keys, errors=errors), store_chain(store, keys, errors=errors)) == (0, [SET_ERROR] * 2)
    assert load(store, keys, errors=errors) == [GET_ERROR] * 2
    assert set(errors) == {"unavailable"}
    node.storage.detach()
    assert not node.namespaces()[0].store.slot.is_awaited
    errors = list[str]()
    assert exists(store, keys, errors=errors) == 0
    assert errors == [], "the operator does not want a store"
    opener.is_down = False
    node.storage.attach(None)
    wait_for(lambda: len(node.namespaces()[0].store.stores) == 1)
    assert store_chain(store, keys) == [STORED] * 2


def test_a_store_that_opens_after_its_namespace_was_closed_is_closed(
    make: Callable[..., tuple[Node, Opener]],
) -> None:
    node, opener = make(namespaces_max=1)
    opener.gate.clear()
    opened_late(node, opener)
    node.close(opener.clock())
    opener.gate.set()
    wait_for(lambda: len(opener.opened) == 1 and _is_closed(opener.opened[0]))


def test_at_the_limit_a_namespace_with_calls_in_flight_is_not_closed(
    make: Callable[..., tuple[Node, Opener]],
) -> None:
    node, _ = make(namespaces_max=2)
    ends = threading.Event()
    busy, used = opened(node), opened(node, b"u" * 32)

    async def serve() -> None:
        calls = [namespace.submit(lambda: ends.wait(WAIT_S), 8) for namespace in (busy, used)]
        with pytest.raises(Refused, match="too many are in use"):
            await asyncio.to_thread(opened, node, b"f" * 32)
        ends.set()
        await asyncio.gather(*calls)
        await asyncio.to_thread(opened, node, b"f" * 32)

    asyncio.run(serve())
    assert [namespace.digest for namespace in node.namespaces()] == [used.digest, (b"f" * 32).hex()]


def test_at_the_limit_a_namespace_without_engines_gives_way_first(make: Callable[..., tuple[Node, Opener]]) -> None:
    node, _ = make(namespaces_max=2)
    for digest, engine in ((b"a" * 32, ""), (b"b" * 32, "b0")):
        node.open(digest.hex(), REQUEST, node.clock() + WAIT_S, engine)
    node.release((b"b" * 32).hex(), "b0", node.clock() + WAIT_S)
    opened(node, b"c" * 32)
    assert [namespace.digest for namespace in node.namespaces()] == [(b"a" * 32).hex(), (b"c" * 32).hex()]


def _is_closed(store: Storage) -> bool:
    store.batch_exists([DIGEST], deadline=math.inf)
    return store.statistics().errors.get("closed", 0) > 0


def test_a_closed_namespace_leaves_no_space_in_the_pool(make: Callable[..., tuple[Node, Opener]]) -> None:
    node, opener = make()
    closing = node.pool.open(DIGEST, 6000)  # as if the same namespace were being closed
    with pytest.raises(Refused, match="is being closed"):
        opened(node)
    assert opener.attempts == 0
    node.pool.close(closing)
    store_chain(as_store(opened(node)), make_keys(2))
    node.close(node.clock() + WAIT_S)
    assert (node.pool.statistics().pages, node.pool._spaces) == (0, {})


def test_a_call_that_finds_its_namespace_closed_is_told_to_open_it_again(
    make: Callable[..., tuple[Node, Opener]]
) -> None:
    node, _ = make()
    namespace = node.open(DIGEST.hex(), REQUEST, node.clock() + WAIT_S)
    namespace.close()
    with pytest.raises(Refused, match="is not open") as caught:
        asyncio.run(node.call(namespace, list))
    assert caught.value.status == 404
