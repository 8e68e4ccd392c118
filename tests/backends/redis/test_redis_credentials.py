"""Providers of credentials, and what redis-py may and may not do on a connection."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import socket
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider

from hicache.backends.redis import RedisDriver
from hicache.config.redis_storage import RedisStorageOptions
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.conformance import GET_ERROR, HIT, STORED, load, make_keys, store_chain, store_of
from hicache_lab.devservers import ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK
from tests.certificates import make_certificates
from tests.hostile.redis_server import HostileServer
from tests.hostile.verbs import texts_of
from tests.proxy import Proxy
from tests.waiting import wait_for

from .store import CODEC, open_on

REPOSITORY = Path(__file__).resolve().parents[3]
USER, PASSWORD = "engine", "hush-Pa55"


def of_redis() -> CredentialProvider:
    """A provider of redis-py."""
    return UsernamePasswordCredentialProvider(USER, PASSWORD)


def of_other_user() -> CredentialProvider:
    return UsernamePasswordCredentialProvider("other", PASSWORD)


class Token(CredentialProvider):
    """A provider whose token expires, as those of clouds do: each connection gets the current one."""

    current = PASSWORD
    asked = 0

    def get_credentials(self) -> tuple[str, str]:
        Token.asked += 1
        return USER, Token.current


class Hanging(CredentialProvider):
    released = threading.Event()

    def get_credentials(self) -> tuple[str]:
        Hanging.released.wait()
        return (PASSWORD,)


class Long(CredentialProvider):
    """A token that does not fit into the buffers of a connection."""

    def get_credentials(self) -> tuple[str]:
        return ("x" * (64 << 20),)


class Failing(CredentialProvider):
    def get_credentials(self) -> tuple[str]:
        raise LookupError(f"no token for {PASSWORD}")


def unmade() -> CredentialProvider:
    raise OSError("no metadata service")


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server with an ACL user and no other."""
    with ValkeyServer(password=PASSWORD, user=USER) as found:
        yield found


def options_of(server: ValkeyServer, name: str, **more: Any) -> dict[str, Any]:
    return {"url": f"redis://{LOOPBACK}:{server.port}", "credential_provider": f"{__name__}:{name}", **more}


def test_a_provider_of_redis_py_logs_in_as_its_user(server: ValkeyServer) -> None:
    """The control: a provider of another user is rejected."""
    keys = make_keys(3)
    with server.client() as client:
        store = open_on(client, options_of(server, "of_redis"))
        with contextlib.closing(store.backend):
            assert store_chain(store, keys) == [STORED] * 3
            assert load(store, keys) == [HIT] * 3
            assert {one["user"] for one in client.client_list()} == {USER}
    with pytest.raises(BackendUnavailable, match=r"wrong_credentials \(WRONGPASS to AUTH\).*credential_provider"):
        store_of(RedisDriver, CODEC, RedisStorageOptions(**options_of(server, "of_other_user")))


def test_each_new_connection_gets_the_current_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the old token, new connections are rejected."""
    keys = make_keys(2)
    with ValkeyServer(password=PASSWORD, user=USER) as server, server.client() as client:
        store = open_on(client, options_of(server, "Token"))
        with contextlib.closing(store.backend):
            assert store_chain(store, keys) == [STORED] * 2
            asked = Token.asked
            assert load(store, keys) == [HIT] * 2
            client.execute_command("ACL", "SETUSER", USER, "resetpass", ">new-token")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert load(store, keys) == [GET_ERROR] * 2
            monkeypatch.setattr(Token, "current", "new-token")
            assert load(store, keys) == [HIT] * 2
            assert Token.asked > asked


def test_a_provider_that_hangs_ends_at_the_timeout(server: ValkeyServer) -> None:
    Hanging.released.clear()
    try:
        with pytest.raises(BackendUnavailable, match="timeout"):
            store_of(RedisDriver, CODEC, RedisStorageOptions(**options_of(server, "Hanging", timeout=0.05)))
    finally:
        Hanging.released.set()


def test_a_login_that_the_server_does_not_read_ends_and_leaves_no_thread() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        options = {"url": f"redis://{LOOPBACK}:{listener.getsockname()[1]}", "credential_provider": f"{__name__}:Long"}
        with pytest.raises(BackendUnavailable, match="timeout"):
            store_of(RedisDriver, CODEC, RedisStorageOptions(**options, timeout=0.05))
        wait_for(lambda: not any("redis-connect" in thread.name for thread in threading.enumerate()))


def test_the_text_of_a_failing_provider_is_not_shown(server: ValkeyServer) -> None:
    with pytest.raises(BackendUnavailable, match="credential_provider raised LookupError") as raised:
        store_of(RedisDriver, CODEC, RedisStorageOptions(**options_of(server, "Failing")))
    assert not any(PASSWORD in text for text in texts_of(raised.value))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"credential_provider": "no.such.module:name"}, r"cannot be made \(ModuleNotFoundError\)"),
        ({"credential_provider": f"{__name__}:missing"}, r"cannot be made \(AttributeError\)"),
        ({"credential_provider": f"{__name__}:unmade"}, r"cannot be made \(OSError\)"),
        ({"credential_provider": "builtins:dict"}, "is a dict, not a redis.CredentialProvider"),
        ({"credential_provider": "no_name"}, "credential_provider"),
        ({"credential_provider": f"{__name__}:of_redis", "username": "me"}, "instead of username and password"),
        ({"credential_provider": f"{__name__}:of_redis", "password_env": "P"}, "instead of username and password"),
    ],
)
def test_a_wrong_provider_is_a_configuration_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        store_of(RedisDriver, CODEC, RedisStorageOptions(url="redis://127.0.0.1:1", **options))


def test_redis_py_sends_nothing_but_the_login() -> None:
    """No CLIENT SETINFO, no PING, no HELLO 3 and no request for notifications."""
    with contextlib.closing(HostileServer(0)) as server:
        url = f"redis://{LOOPBACK}:{server.port}"
        options = RedisStorageOptions(url=url, credential_provider=f"{__name__}:of_redis")
        store_of(RedisDriver, CODEC, options).close()
        assert set(server.requests) == {b"AUTH", b"HELLO", b"EXISTS"}
        assert server.requests[b"AUTH"] == server.connections


def test_a_server_is_proved_by_the_given_authority_alone(
    valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system trusts the server's authority. The control: without `tls_ca_file` that is enough."""
    ours, systems = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("ours", "systems"))
    monkeypatch.setenv("SSL_CERT_FILE", str(systems.ca_file))
    with Proxy(valkey.port, tls=systems.server_context()) as proxy:
        url = f"rediss://{LOOPBACK}:{proxy.port}"
        store_of(RedisDriver, CODEC, RedisStorageOptions(url=url)).close()
        with pytest.raises(BackendUnavailable, match="tls"):
            store_of(RedisDriver, CODEC, RedisStorageOptions(url=url, tls_ca_file=ours.ca_file))


def test_one_private_name_of_redis_py_is_used_and_the_next_major_version_is_excluded() -> None:
    """The other tests prove that the name works with the version that they run with."""
    folder = REPOSITORY / "hicache/backends/redis"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    assert set(re.findall(r"\bconnection\.(_\w+)", source)) == {"_sock"}
    assert not re.findall(r"\bredis\.(?:\w+\.)*_\w+", source)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["redis"])
    installed = importlib.metadata.version("redis")
    assert needed.specifier.contains(installed)
    assert not needed.specifier.contains(f"{int(installed.split('.')[0]) + 1}.0.0")
