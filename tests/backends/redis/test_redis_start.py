"""Opening a store detects errors and reports them: which server, what failed, what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.redis import RedisDriver
from hicache.config.redis_storage import RedisStorageOptions
from hicache.errors import BackendUnavailable, ConfigError, InvalidInput
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, STORED, load, make_keys, store_chain, store_of
from hicache_lab.devservers import DevService, RedisCluster, RedisSentinel, ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.certificates import make_certificates
from tests.listening import Listener
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import wait_for

from .store import CODEC, fresh_prefix, open_on


def refused(match: str, kind: type[Exception] = BackendUnavailable, codec: FrameCodec = CODEC, **options: Any) -> str:
    """Return the error message of opening a store with these options."""
    with pytest.raises(kind, match=match) as raised:
        store_of(RedisDriver, codec, RedisStorageOptions(timeout=options.pop("timeout", 2.0), **options))
    return str(raised.value)


def test_an_address_without_a_server_is_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    assert f"127.0.0.1:{port}" in refused("connection_refused.*start the server", url=f"redis://127.0.0.1:{port}")
    # On a machine without a name service, the lookup fails in the same way.
    refused("dns.*host name|timeout", url="redis://no-such-host.invalid", timeout=5.0)
    refused("unreachable.*path and permissions", unix_socket=tmp_path / "socket")


@pytest.mark.parametrize("password", [None, "wrong-secret"])
def test_wrong_and_missing_passwords_are_refused(password: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    if password is not None:
        monkeypatch.setenv("WRONG_PASSWORD", password)
        options["password_env"] = "WRONG_PASSWORD"
    with ValkeyServer(password="right-secret") as server:
        text = refused("wrong_credentials.*password_env", url=f"redis://127.0.0.1:{server.port}", **options)
    assert "secret" not in text


def test_an_error_names_the_command_that_the_server_refused(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{valkey.port}"
    monkeypatch.setenv("PASSWORD_OF_TESTS", "hush")
    refused(r"server_error \(ERR to SELECT\)", url=url, db=99)
    refused(r"wrong_credentials \(ERR to AUTH\): .* has no password", url=url, password_env="PASSWORD_OF_TESTS")


def test_unset_variables_and_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1"
    refused("HICACHE_NOT_SET is not set", ConfigError, url=url, password_env="HICACHE_NOT_SET")
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o644)
    assert "secret\n" not in refused("chmod 600", ConfigError, url=url, password_file=file)
    file.chmod(0o600)
    file.write_text("\n")
    refused("is empty", ConfigError, url=url, password_file=file)
    refused("not both", ConfigError, url=url, password_file=file, password_env="X")
    refused("a user name needs a password", ConfigError, url=url, username="me")


def test_a_user_without_rights_to_the_keys_is_refused(login: Callable[[DevService], None]) -> None:
    with ValkeyServer(password="p", user="engine", acl="~other:* +@all") as server:
        login(server)
        refused("access_denied.*ACL", **server.storage()[1])


def test_tls_to_a_plain_server_or_an_untrusted_one_is_refused(valkey: ValkeyServer, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    # A server without TLS reads the handshake as the beginning of a line, and waits for its end.
    plain = f"rediss://127.0.0.1:{valkey.port}"
    refused("timeout.*redis:// against rediss://", url=plain, tls_ca_file=made.ca_file, timeout=0.3)
    with Proxy(valkey.port, tls=made.server_context()) as proxy:
        refused("tls.*tls_ca_file", url=f"rediss://127.0.0.1:{proxy.port}")
        refused("closed the connection|not from a Redis server|timeout", url=f"redis://127.0.0.1:{proxy.port}")
        missing = tmp_path / "missing.pem"
        refused("tls_ca_file .* cannot be read", ConfigError, url="rediss://127.0.0.1:1", tls_ca_file=missing)
        url = f"rediss://127.0.0.1:{proxy.port}"
        store_of(RedisDriver, CODEC, RedisStorageOptions(url=url, tls_ca_file=made.ca_file)).close()
    with Proxy(valkey.port, tls=made.server_context(ask_client=True)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        refused("tls_cert_file", url=url, tls_ca_file=made.ca_file)  # TestOtherPlaces has the certificate


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not from a Redis server"),
        (b"-ERR unknown command\r\n", "older than Redis 6.2"),
        (b"*4\r\n$7\r\nversion\r\n$5\r\n5.0.7\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n", "version 5.0; use Redis 6.2"),
        (b"*4\r\n$7\r\nversion\r\n$5\r\n6.2.0\r\n$4\r\nmode\r\n$8\r\nsentinel\r\n", "name it under sentinels"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "still reading its data set"),
        (b"-ERR max number of clients reached\r\n", "maxclients"),
        (b":1\r\n", "not from a Redis server"),
    ],
)
def test_servers_of_a_different_kind_are_refused(answer: bytes, match: str) -> None:
    def serve(sock: socket.socket, number: int) -> None:
        while sock.recv(65536):
            sock.sendall(answer)

    with Listener(serve) as server:
        url = f"redis://127.0.0.1:{server.port}"
        refused(match, ConfigError if "sentinels" in match else BackendUnavailable, url=url)


def test_a_server_that_does_not_answer_is_refused(valkey: ValkeyServer) -> None:
    with Proxy(valkey.port) as proxy:
        proxy.set(Faults(stall=Direction.BOTH))
        refused("timeout.*did not answer in time", url=f"redis://127.0.0.1:{proxy.port}", timeout=0.2)


def test_wrong_groups_of_servers_are_refused(
    valkey: ValkeyServer, redis_cluster: RedisCluster, redis_sentinel: RedisSentinel
) -> None:
    node, sentinel = f"127.0.0.1:{redis_cluster.nodes[0].port}", f"127.0.0.1:{redis_sentinel.sentinel.port}"
    refused("name it under cluster", ConfigError, url=f"redis://{node}")
    refused("name it under sentinels", ConfigError, url=f"redis://{sentinel}")
    refused("name it under url", ConfigError, cluster=[f"127.0.0.1:{valkey.port}"])
    refused("no_primary.*check `service`", sentinels=[sentinel], service="nobody")
    (port,) = free_ports(1)
    refused("no_primary|refused", sentinels=[f"127.0.0.1:{port}"], service="hicache")
    # One node that answers is enough.
    store_of(RedisDriver, CODEC, RedisStorageOptions(cluster=[f"127.0.0.1:{port}", node])).close()


@pytest.mark.parametrize("read_from", ["primary", "replica"])
def test_a_hanging_sentinel_is_skipped(redis_sentinel: RedisSentinel, read_from: str) -> None:
    """It may be the first of the list and never answer again, so it must not use up the time of the others."""
    keys = make_keys(3)
    _, options = redis_sentinel.storage(key_prefix=fresh_prefix(), read_from=read_from, timeout=2.0)
    with socket.create_server((LOOPBACK, 0)) as silent, redis_sentinel.primary.client() as client:
        options["sentinels"] = [f"{LOOPBACK}:{silent.getsockname()[1]}", *options["sentinels"]]
        store = open_on(client, options)
        assert store_chain(store, keys) == [STORED] * 3
        wait_for(lambda: load(store, keys) == [HIT] * 3)
        assert dict(store.backend.statistics().errors) == {}
        store.backend.close()


def test_pages_longer_than_a_redis_string_are_refused() -> None:
    refused("longer than a Redis string", InvalidInput, FrameCodec(b"n" * 32, 600 << 20), url="redis://127.0.0.1:1")


def test_without_redis_py_an_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["redis"] = None
from hicache.backends.registry import BackendSpec, open_spec
from hicache.errors import ConfigError
from hicache.frame import FrameCodec
try:
    open_spec(BackendSpec("redis", {"url": "redis://127.0.0.1:1"}), FrameCodec(bytes(32), 100))
except ConfigError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    assert "install the extra redis" in ran.stdout
