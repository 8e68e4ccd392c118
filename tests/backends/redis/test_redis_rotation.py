"""Passwords and certificates that are replaced, on the server and in a mounted Secret, while a store is open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.errors import StoreError
from hicache.backends.redis.connect import Connector
from hicache.backends.redis.options import open_access
from hicache.config.redis_storage import RedisStorageOptions
from hicache_lab.conformance import load, make_keys, soon, store_chain
from hicache_lab.devservers import RedisSentinel, ValkeyServer
from tests.backends.redis.store import opened
from tests.certificates import Certificates, make_certificates
from tests.mounted import MountedSecret
from tests.proxy import Proxy

HITS, ERRORS, STORED = [GetOutcome.HIT] * 3, [GetOutcome.ERROR] * 3, [SetOutcome.STORED] * 3
KEYS, MORE = make_keys(3), make_keys(3, "more")


def drop_clients(client: Any) -> None:
    """End the connections of all others, as a restart or a fail-over does."""
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def change_default(client: Any) -> None:
    client.config_set("requirepass", "new")
    drop_clients(client)


def change_user(client: Any) -> None:
    client.execute_command("ACL", "SETUSER", "engine", "resetpass", ">new")
    drop_clients(client)


@pytest.mark.parametrize(("user", "change"), [(None, change_default), ("engine", change_user)], ids=["default", "acl"])
def test_a_replaced_password_is_used_for_new_connections(
    tmp_path: Path, user: str | None, change: Callable[[Any], None]
) -> None:
    """The control: until the file changes, the server rejects the store."""
    mounted = MountedSecret(tmp_path / "secret", {"password": "old\n"})
    with ValkeyServer(password="old", user=user) as server, server.client() as client:
        options: dict[str, Any] = {"password_file": mounted["password"], "password_env": None}
        with opened(server, **options) as (_, store):
            assert store_chain(store, KEYS) == STORED
            change(client)
            assert load(store, KEYS) == ERRORS
            assert store.backend.statistics().errors["wrong_credentials"]
            mounted.replace({"password": "new\n"})
            assert load(store, KEYS) == HITS
            assert store_chain(store, MORE) == STORED


def test_a_replaced_password_of_the_sentinels_is_used_for_their_next_request(tmp_path: Path) -> None:
    """The control: until the file changes, the sentinel rejects the store."""
    mounted = MountedSecret(tmp_path / "secret", {"sentinel": "old"})
    with RedisSentinel() as group, group.sentinel.client() as sentinel:
        sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", ">old")
        options = group.storage(sentinel_password_file=mounted["sentinel"])[1]
        connector = Connector(open_access(RedisStorageOptions(**options)))
        primary = connector.find_primary(soon())
        sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", ">new")
        with pytest.raises(StoreError, match="wrong_credentials"):
            connector.find_primary(soon())
        mounted.replace({"sentinel": "new"})
        assert connector.find_primary(soon()) == primary


def files_of(made: Certificates) -> dict[str, str | bytes]:
    return {"ca": made.ca_file.read_bytes(), "cert": made.client_cert_file.read_bytes(),
            "key": made.client_key_file.read_bytes()}


def test_replaced_certificates_are_used_for_new_connections(
    valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The control: until the files change, the new server is not trusted."""
    old, new = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("old", "new"))
    mounted = MountedSecret(tmp_path / "tls", files_of(old))
    served = old.server_context(ask_client=True)
    with Proxy(valkey.port, tls=served) as proxy:
        options: dict[str, Any] = {
            "url": f"rediss://127.0.0.1:{proxy.port}", "tls_ca_file": mounted["ca"], "tls_cert_file": mounted["cert"],
            "tls_key_file": mounted["key"],
        }
        with opened(valkey, **options) as (_, store):
            assert store_chain(store, KEYS) == STORED
            served.load_cert_chain(new.cert_file, new.key_file)
            served.load_verify_locations(new.ca_file)
            proxy.drop()
            assert load(store, KEYS) == ERRORS
            assert store.backend.statistics().errors["tls"]
            mounted.replace(files_of(new))
            assert load(store, KEYS) == HITS
