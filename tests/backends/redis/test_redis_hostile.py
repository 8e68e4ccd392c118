"""Hostile servers: they redirect, name other nodes, repeat secrets, and send endless replies."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.redis import RedisDriver
from hicache.backends.redis.connect import Connector
from hicache.backends.redis.options import named_address, open_access
from hicache.backends.redis.pool import Pools, Purpose
from hicache.backends.registry import BackendSpec, open_stored
from hicache.backends.store import Store
from hicache.config.addresses import Address
from hicache.config.redis_storage import RedisStorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.conformance import GET_ERROR, MISS, SET_ERROR, full_frames, make_keys, soon, store_of
from hicache_lab.devservers.ports import LOOPBACK
from tests.certificates import make_certificates
from tests.hostile.redis_server import (
    ELSEWHERE,
    PASSWORD,
    PASSWORD_ENV,
    HostileServer,
    Trap,
    array,
    bulk,
    encodings,
)
from tests.hostile.verbs import texts_of
from tests.listening import Listener
from tests.proxy import Proxy
from tests.seeds import IS_SOAK

from .store import CODEC

pytestmark = pytest.mark.long

# A whole reply may have 8 MiB and about 260,000 elements; Python needs about three times that.
MEMORY_MAX_BYTES = 48 << 20


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    """A listener; asserts at the end that it got no connection."""
    trap = Trap(tmp_path)
    yield trap
    assert trap.close() == 0


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)


@contextlib.contextmanager
def hostile(lie: Callable[[list[bytes]], bytes | None], mode: str = "single") -> Iterator[tuple[HostileServer, Any]]:
    """A server that sends false replies once it is `hostile`, and the options of a store on it."""
    with contextlib.closing(HostileServer(0, mode, lie=lie)) as server:
        address = f"{LOOPBACK}:{server.port}"
        places: dict[str, dict[str, Any]] = {
            "single": {"url": f"redis://{address}"},
            "cluster": {"cluster": [address]},
            "sentinel": {"sentinels": [address], "service": "cache"},
        }
        yield server, {**places[mode], "password_env": PASSWORD_ENV, "timeout": 5.0}


@contextlib.contextmanager
def opened_hostile(
    lie: Callable[[list[bytes]], bytes | None], mode: str = "single", **more: Any
) -> Iterator[tuple[HostileServer, Store]]:
    """A backend on a server that sends false replies from now on."""
    with hostile(lie, mode) as (server, options), contextlib.closing(open_on(options | more)) as backend:
        server.hostile = True
        yield server, backend


def refused(
    lie: Callable[[list[bytes]], bytes | None], mode: str = "single", match: str | None = None, **more: Any
) -> BackendUnavailable:
    """Return the error of opening a store on a server that sends false replies."""
    with hostile(lie, mode) as (server, options):
        server.hostile = True
        with pytest.raises(BackendUnavailable, match=match) as raised:
            open_on(options | more)
    return raised.value


def open_on(options: dict[str, Any]) -> Store:
    return store_of(RedisDriver, CODEC, RedisStorageOptions(**options))


def use_all(backend: Any, keys: list[bytes]) -> None:
    """Call every verb, and expect only errors."""
    frames = full_frames(CODEC, keys)
    assert backend.batch_exists(keys, deadline=soon()) == 0
    assert backend.batch_has(keys, deadline=soon()) == [False] * len(keys)
    assert backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * len(keys)
    assert backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * len(keys)
    assert backend.delete(keys, deadline=soon()) == 0


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
@pytest.mark.parametrize("mode", ["single", "sentinel", "cluster"])
@pytest.mark.parametrize("target", ["port", "unix socket", "not a name", "a long name"])
def test_redirections_are_followed_only_to_nodes_of_a_cluster(trap: Trap, mode: str, word: bytes, target: str) -> None:
    """400 redirections cause no connection to another address, no new one to the server, and no request for routes."""
    where = {
        "port": f"{ELSEWHERE}:{trap.port}", "unix socket": f"{trap.path}:0", "not a name": "a..b:7000",
        "a long name": f"{'x' * 64}.example:7000",
    }[target]

    def lie(request: list[bytes]) -> bytes | None:
        if request[0] in (b"CLUSTER", b"AUTH", b"HELLO"):
            return None
        return b"-%b 1 %b\r\n" % (word, where.encode())

    with opened_hostile(lie, mode) as (server, backend):
        use_all(backend, make_keys(100))
        expected = "foreign_address" if (mode, target) == ("cluster", "port") else word.decode().lower()
        assert set(backend.statistics().errors) == {expected}
        assert backend.statistics().errors[expected] >= 301
        assert server.connections < 10
        assert server.requests[b"CLUSTER"] < 10  # once per call


@pytest.mark.parametrize("allowed", [True, False])
def test_a_redirection_to_an_allowed_node_without_slots_is_followed(allowed: bool) -> None:
    """The control of the tests above, and of `allowed_nodes`: the other server serves the page."""
    keys = make_keys(3)
    with hostile(lambda request: None, "cluster") as (new_node, _):
        new_node.hostile = True
        ask = b"-ASK 1 %b:%d\r\n" % (LOOPBACK.encode(), new_node.port)
        more: dict[str, Any] = {"allowed_nodes": ["127.0.0.0/8"]} if allowed else {}
        with opened_hostile(lambda request: ask if request[0] == b"GET" else None, "cluster", **more) as (_, backend):
            outcomes = backend.batch_get(keys, full_frames(CODEC, keys), deadline=soon())
            assert outcomes == [MISS if allowed else GET_ERROR] * 3
            assert dict(backend.statistics().errors) == ({} if allowed else {"foreign_address": 3})
        assert new_node.requests[b"GET"] == (3 if allowed else 0)


@pytest.mark.parametrize("mode", ["cluster", "sentinel"])
def test_a_topology_outside_the_allowed_nodes_is_not_used(trap: Trap, mode: str) -> None:
    facts = array(*map(bulk, (b"ip", ELSEWHERE.encode(), b"port", b"%d" % trap.port, b"flags", b"master")))
    node = array(bulk(ELSEWHERE.encode()), b":%d\r\n" % trap.port)
    lies = {b"CLUSTER": array(array(b":0\r\n", b":16383\r\n", node)), b"SENTINEL": facts}
    allowed = [LOOPBACK, ".cache.example"]
    refused(lambda request: lies.get(request[0]), mode, r"foreign_address.*allowed_nodes", allowed_nodes=allowed)


def test_a_sentinel_that_names_itself_does_not_get_the_password_of_the_nodes() -> None:
    with hostile(lambda request: None, "sentinel") as (server, options):
        with pytest.raises(BackendUnavailable, match="foreign_address"):
            open_on(options | {"allowed_nodes": ["10.1.0.0/16"]})
        assert server.requests[b"SENTINEL"] == 1 and server.requests[b"AUTH"] == 0
        open_on(options | {"allowed_nodes": [LOOPBACK]}).close()  # the control
        assert server.requests[b"AUTH"]


@pytest.mark.parametrize(
    ("host", "port"),
    [("{path}", "0"), ("{path}", "7000"), ("a..b", "7000"), ("host", "0"), ("host", "65536"), ("x" * 300, "7000"),
     ("", "7000"), ("h", "-1")],
)
def test_sentinels_and_nodes_name_addresses_on_the_network_only(trap: Trap, host: str, port: str) -> None:
    name = host.format(path=trap.path).encode()
    facts = array(*map(bulk, (b"ip", name, b"port", port.encode(), b"flags", b"master")))
    slots = array(array(b":0\r\n", b":16383\r\n", array(bulk(name or b"/"), b":%b\r\n" % port.encode())))
    lies = {b"SENTINEL": facts, b"CLUSTER": slots}
    for mode in ("sentinel", "cluster"):
        refused(lambda request: lies.get(request[0]), mode, "protocol")


def test_nodes_named_by_a_cluster_are_reached_only_over_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    heard: list[bytes] = []
    with Listener(lambda sock, number: heard.append(sock.recv(4096)), ELSEWHERE) as listener:
        node = array(bulk(ELSEWHERE.encode()), b":%d\r\n" % listener.port)
        slots = array(array(b":0\r\n", b":16383\r\n", node))
        with (
            hostile(lambda request: slots if request[0] == b"CLUSTER" else None, "cluster") as (server, options),
            Proxy(server.port, tls=made.server_context()) as proxy, pytest.raises(BackendUnavailable),
        ):
            server.hostile = True
            place = [f"{LOOPBACK}:{proxy.port}"]
            open_on({**options, "cluster": place, "tls": True, "tls_ca_file": made.ca_file, "timeout": 5.0})
    assert heard[0][:1] == bytes([0x16])  # a TLS handshake
    assert PASSWORD.encode() not in heard[0]


def test_the_number_of_pools_of_unknown_servers_is_limited() -> None:
    pools = Pools(Connector(open_access(RedisStorageOptions(url="redis://h:1"))), 2)
    known = {Address("known", port) for port in range(1, 4)}
    for address in known:
        pools.of(address, Purpose.BODIES)
    pools.keep(set(known))
    for port in range(1, 401):
        pools.of(Address("stranger", port), Purpose.BODIES)
        pools.of(Address("stranger", port), Purpose.KEYS)
    kept = {address for address, _, _ in pools._pools}
    assert known <= kept and len(kept - known) <= 8
    pools.close()


FORMS = ["-ERR unknown command 'AUTH {}'", "-{}", "-WRONGPASS {} is wrong", "-NOPERM '{}' command", "+{}",
         "-ERR {} and more", "-MOVED 1 {}:7000", ":{}"]


@pytest.mark.parametrize(
    ("mode", "form"),
    [*(("single", form) for form in FORMS), *itertools.product(["sentinel", "cluster"], [FORMS[0], FORMS[6]])],
)
def test_no_text_of_a_server_gets_into_a_message(mode: str, form: str) -> None:
    for secret in (*sorted(encodings(PASSWORD)), "letters-only"):
        answer = form.format(secret).encode() + b"\r\n"
        login: dict[str, Any] = {} if mode != "sentinel" else {
            "sentinel_password_env": PASSWORD_ENV, "password_env": None,
        }
        error = refused(functools.partial(lambda answer, request: answer, answer), mode, **login)
        assert not any(secret in text for text in texts_of(error))


def test_no_text_of_the_tls_library_gets_into_a_chain_of_exceptions(tmp_path: Path) -> None:
    """The text quotes the host name, which a server may have chosen. The certificate is for 127.0.0.1."""
    made = make_certificates(tmp_path)

    def serve(sock: socket.socket, number: int) -> None:
        made.server_context().wrap_socket(sock, server_side=True)

    with Listener(serve, ELSEWHERE) as listener, pytest.raises(BackendUnavailable, match="mismatch") as raised:
        open_on({"url": f"rediss://{ELSEWHERE}:{listener.port}", "tls_ca_file": made.ca_file, "timeout": 5.0})
    assert not any("not valid for" in text for text in texts_of(raised.value))


@pytest.mark.parametrize(
    "wrong",
    [{"sentinels": ["h"], "service": "\ud800"}, {"url": "redis://h", "username": "\ud800"},
     {"sentinels": ["h"], "service": "s", "sentinel_username": "\udfff", "sentinel_password_env": PASSWORD_ENV},
     {"unix_socket": "\ud800"}],
)
def test_a_text_that_cannot_be_sent_is_refused_without_the_password(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not valid Unicode|not valid in file names") as raised:
        store_of(RedisDriver, CODEC, RedisStorageOptions(**wrong, password_env=PASSWORD_ENV))
    assert raised.value.__context__ is None and PASSWORD not in str(raised.value)
    open_access(RedisStorageOptions(unix_socket="/run/\udcff"))  # bytes that are not UTF-8


@pytest.mark.parametrize("version", [b"\xc2\xb2.\xc2\xb3", b"9" * 5000, b"", PASSWORD.encode()])
def test_an_invalid_version_is_not_shown(version: bytes) -> None:
    hello = array(*map(bulk, (b"version", version, b"mode", b"standalone")))
    refused(lambda request: hello if request[0] == b"HELLO" else None, match=r"no version; use Redis 6\.2")


ENDLESS = {
    "elements": b"*9\r\n" + (b"*200000\r\n" + b"*0\r\n" * 200_000) * 9,
    "an element count": b"*10000000\r\n" + b"*0\r\n" * 400_000,
    "values": b"*9\r\n" + bulk(bytes(7 << 20)) * 9,
    "one value": b"$60000000\r\n" + bytes(10 << 20),
    "lists in lists": b"*1\r\n" * 100_000,
    "lines": b"*200000\r\n" + (b"+" + b"x" * 16_000 + b"\r\n") * 2000,
    "errors": (b"-" + b"x" * 16_000 + b"\r\n") * 2000,
}


VERBS = ("open", "sentinel", "usage", "exists", "list")
# Each reply to one verb; a soak sends each to all of them.
ENDLESS_TO = [*(itertools.product(ENDLESS, VERBS) if IS_SOAK else zip(ENDLESS, itertools.cycle(VERBS)))]


@pytest.mark.parametrize(("kind", "verb"), ENDLESS_TO)
def test_an_endless_reply_takes_limited_memory(kind: str, verb: str) -> None:
    mode = "sentinel" if verb == "sentinel" else "single"
    with hostile(lambda request: ENDLESS[kind], mode) as (server, options), contextlib.ExitStack() as opened:
        store: Any = None
        if verb in ("usage", "exists"):
            store = opened.enter_context(contextlib.closing(open_on(options)))
        elif verb == "list":
            store = opened.enter_context(contextlib.closing(open_stored(BackendSpec("redis", options))))
        keys = make_keys(1000)
        server.hostile = True
        tracemalloc.start()
        try:
            if store is None:
                with pytest.raises(BackendUnavailable):
                    open_on(options)
            elif verb == "usage":
                assert store.usage().pages == 0 and store.statistics().errors
            elif verb == "exists":
                assert store.batch_exists(keys, deadline=soon()) == 0 and store.statistics().errors
            else:
                with pytest.raises(BackendUnavailable):
                    list(store.pages())
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < MEMORY_MAX_BYTES


def test_many_long_replies_take_limited_memory() -> None:
    """Each step of SCAN has one long name of another store, 95 MiB in total."""
    names = iter(range(12))

    def lie(request: list[bytes]) -> bytes | None:
        if request[0] != b"SCAN":
            return None
        number = next(names)
        return array(bulk(b"0" if number == 11 else b"5"), array(bulk(b"%08d" % number + bytes((8 << 20) - 200))))

    with opened_hostile(lie) as (_, backend):
        tracemalloc.start()
        try:
            assert backend.usage().pages == 0 and not backend.statistics().errors
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < MEMORY_MAX_BYTES


def test_leftover_decrypted_bytes_are_not_read_as_the_next_reply(tmp_path: Path) -> None:
    """The error has exactly the 32 bytes read ahead of a page; the rest of its record stays in the TLS library."""
    made = make_certificates(tmp_path)
    (key,) = make_keys(1)
    reply = b"-ERR " + b"x" * 25 + b"\r\n" + b"$-1\r\n"
    with (
        hostile(lambda request: reply if request[0] == b"GET" else None) as (server, options),
        Proxy(server.port, tls=made.server_context()) as proxy,
    ):
        options.update({"url": f"rediss://{LOOPBACK}:{proxy.port}", "tls_ca_file": made.ca_file})
        with contextlib.closing(open_on(options)) as backend:
            server.hostile = True
            for _ in range(2):
                assert backend.batch_get([key], full_frames(CODEC, [key]), deadline=soon()) == [GET_ERROR]


@pytest.mark.parametrize("verb", [b"SET", b"TOUCH", b"EXISTS", b"UNLINK", b"STRLEN"])
def test_a_connection_with_the_start_of_a_longer_reply_is_not_reused(verb: bytes) -> None:
    begun: set[threading.Thread] = set()  # the server has one for each connection
    again: list[bytes] = []

    def lie(request: list[bytes]) -> bytes | None:
        if threading.current_thread() in begun:
            again.append(request[0])
        if request[0] != verb:
            return None
        begun.add(threading.current_thread())
        return b"$7\r\n"

    keys = make_keys(1)
    with opened_hostile(lie) as (server, backend):
        frames = full_frames(CODEC, keys)
        for _ in range(2):
            backend.batch_set(keys, frames, parent=None, deadline=soon())
            backend.batch_get(keys, frames, deadline=soon())
            backend.batch_exists(keys, deadline=soon())
            backend.delete(keys, deadline=soon())
            backend.usage()
        assert server.requests[verb] >= 2
        assert dict(backend.statistics().errors) == {"protocol": 2}
    assert not again


def test_a_server_that_changes_its_mode_gets_no_page() -> None:
    facts = array(*map(bulk, (b"version", b"8.0.0", b"mode", b"cluster")))
    with opened_hostile(lambda request: facts if request[0] == b"HELLO" else None) as (server, backend):
        keys = make_keys(2)
        assert backend.batch_get(keys, full_frames(CODEC, keys), deadline=soon()) == [GET_ERROR] * 2
        assert dict(backend.statistics().errors) == {"unsupported": 2}
        assert not server.requests[b"GET"]


def test_connections_open_once_threads_can_start_again() -> None:
    with contextlib.closing(HostileServer(0)) as server:
        where = Address(LOOPBACK, server.port)
        connector = Connector(open_access(RedisStorageOptions(url=f"redis://{where}")))
        before = threading.stack_size(1 << 46)  # more memory than the machine has, so no thread starts
        try:
            for _ in range(40):  # more than the limit of concurrent attempts
                with pytest.raises(StoreError) as raised:
                    connector.open(where, soon(), read_only=False, no_touch=False)
                assert raised.value.kind is ErrorKind.NO_THREAD
        finally:
            threading.stack_size(before)
        connector.open(where, soon(), read_only=False, no_touch=False).close()


@pytest.mark.parametrize(
    ("verb", "reply"),
    [("DBSIZE", b"*0\r\n"), ("DBSIZE", b":-5\r\n"), ("SCAN", array(bulk(b"x"), array())), ("SCAN", b"+OK\r\n"),
     ("STRLEN", b":" + b"9" * 5000 + b"\r\n"), ("STRLEN", b":x\r\n"), ("STRLEN", b"+5\r\n")],
)
def test_an_invalid_usage_is_an_error(verb: str, reply: bytes) -> None:
    with (
        hostile(lambda request: reply if request[0] == verb.encode() else None) as (server, options),
        contextlib.closing(open_on(options)) as backend,
    ):
        honest = backend.usage()
        server.hostile = True
        assert backend.usage() == honest and sum(backend.statistics().errors.values()) == 1


def test_clear_removes_only_its_namespace_even_if_a_server_lists_others() -> None:
    """The list has other namespaces, other prefixes, invalid names, and a page twice; the second list is endless."""
    ours, theirs = CODEC.namespace.hex(), bytes(32).hex()
    page, *others = [f"hicache:{ours}:{key.hex()}" for key in make_keys(5)]
    names = [page, others[0].replace(ours, theirs), others[1].replace("hicache", "other"), others[2] + "0",
             others[3][:-64] + others[3][-64:].upper(), others[0].removeprefix("hicache:"), "", "*", page]
    unlinked: set[bytes] = set()
    cursors = iter([b"5", b"0"])

    def lie(request: list[bytes]) -> bytes | None:
        if request[0] == b"UNLINK":
            unlinked.add(request[1])
        if request[0] in (b"OBJECT", b"STRLEN", b"EXISTS"):
            return b":1\r\n"
        listed = array(*(bulk(name.encode()) for name in names))
        return array(bulk(next(cursors, b"5")), listed) if request[0] == b"SCAN" else None

    with opened_hostile(lie) as (_, backend):
        assert backend.clear(deadline=soon()) == 1
        assert dict(backend.statistics().errors) == {}
        backend.clear(deadline=soon(0.5))
        assert set(backend.statistics().errors) == {"deadline"}
    assert unlinked == {page.encode()}


@pytest.mark.parametrize("text", [b"9" * 5000, b"-1", b"\xc2\xb2", b""])
def test_an_invalid_maxmemory_is_not_reported(text: bytes) -> None:
    info = bulk(b"maxmemory:" + text + b"\r\n")
    with hostile(lambda request: info if request[0] == b"INFO" else None) as (server, options):
        server.hostile = True
        with contextlib.closing(open_on(options)) as backend:
            assert backend.usage().capacity_bytes is None


@pytest.mark.parametrize(("host", "port"), [("a..b", 1), ("x" * 64, 1), ("/run/socket", 1), ("", 1), ("h", 0),
                                            ("h", 65536), ("h", True), ("h\n", 1), ("::a..b", 1),
                                            ("fe80::1%a/b", 1)])
def test_only_valid_network_addresses_are_accepted(host: str, port: Any) -> None:
    assert named_address(host.encode(), port) is None


def test_allowed_nodes_are_networks_addresses_names_and_domains() -> None:
    access = open_access(RedisStorageOptions(
        cluster=["configured:1"], allowed_nodes=["10.0.0.0/8", "fd00::/8", "one.example", ".cache.example"],
    ))
    for host in ("10.1.2.3", "fd00::5", "one.example", "ONE.example.", "a.cache.example"):
        assert access.allows(Address(host, 1)), host
    for host in ("11.0.0.1", "::1", "two.example", "cache.example", "xcache.example", "configured"):
        assert not access.allows(Address(host, 2)), host
    for number in (b"10.1", b"010.0.0.1", b"167772161"):
        assert named_address(number, 2) is None, "a resolver takes it for an address"
    assert access.allows(Address("configured", 1))
    wrong: list[Any] = ["10.0.0.1/8", "1.2.3.4/33", "10.0.0.1.", "a b", "", ".", "h:1", "*.example", 5, None]
    for entry in wrong:
        with pytest.raises(ConfigError, match="allowed_nodes"):
            RedisStorageOptions(cluster=["h"], allowed_nodes=[entry])
    with pytest.raises(ConfigError, match="sentinels or cluster"):
        RedisStorageOptions(url="redis://h", allowed_nodes=["10.0.0.0/8"])
