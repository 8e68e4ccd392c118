"""From the plain options of a configuration to a store: addresses, secrets, TLS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config.files import require_readable
from ...config.secret import read_secret
from ...errors import ConfigError, InvalidInput
from ...frame import FrameCodec
from .backend import RedisBackend
from .options import (
    SENTINEL_PORT,
    Endpoint,
    Login,
    Mode,
    ReadFrom,
    RedisOptions,
    Tls,
    UnixSocket,
    parse_addresses,
    parse_allowed,
    parse_url,
)


def redis_options(  # noqa: PLR0913 - one parameter for each entry of the configuration
    *,
    url: str | None = None,
    unix_socket: str | os.PathLike[str] | None = None,
    cluster: Sequence[str] | None = None,
    sentinels: Sequence[str] | None = None,
    service: str | None = None,
    replicas: Sequence[str] = (),
    allowed_nodes: Sequence[str] | None = None,
    db: int = 0,
    username: str | None = None,
    password_env: str | None = None,
    password_file: str | os.PathLike[str] | None = None,
    sentinel_username: str | None = None,
    sentinel_password_env: str | None = None,
    sentinel_password_file: str | os.PathLike[str] | None = None,
    tls: bool = False,
    tls_ca_file: str | os.PathLike[str] | None = None,
    tls_cert_file: str | os.PathLike[str] | None = None,
    tls_key_file: str | os.PathLike[str] | None = None,
    tls_check_hostname: bool = True,
    key_prefix: str = "hicache:",
    ttl_s: float | None = None,
    read_from: ReadFrom = "primary",
    connections: int = 2,
    pipeline_bytes: int = 512 << 10,
    timeout_s: float = 1.0,
) -> RedisOptions:
    """The options of a store from those of a configuration, one of `url`, `unix_socket`, `cluster` and `sentinels`
    among them. Reads the secrets that they name.

    Raises InvalidInput for what cannot work, ConfigError for a file or secret that cannot be read.
    """
    mode: Mode = "single"
    if sum(place is not None for place in (url, unix_socket, cluster, sentinels)) != 1:
        raise InvalidInput("redis: give exactly one of url, unix_socket, cluster and sentinels")
    if url is not None:
        place = parse_url(url)
        addresses: tuple[Endpoint, ...] = (place.address,)
        db, tls = db or place.db, tls or place.is_tls
    elif unix_socket is not None:
        addresses = (UnixSocket(os.fspath(unix_socket)),)
    elif cluster is not None:
        mode, addresses = "cluster", parse_addresses(cluster)
    else:
        mode, addresses = "sentinel", parse_addresses(sentinels or (), SENTINEL_PORT)
    if not tls and (tls_ca_file or tls_cert_file or tls_key_file):
        raise InvalidInput("redis: the files of TLS go with tls: true, or a url that begins with rediss://")
    for name, path in (("ca", tls_ca_file), ("cert", tls_cert_file), ("key", tls_key_file)):
        if path is not None:
            require_readable(path, f"backend redis: tls_{name}_file")
    return RedisOptions(
        addresses,
        mode=mode,
        service=service,
        replicas=parse_addresses(replicas),
        allowed_nodes=None if allowed_nodes is None else parse_allowed(allowed_nodes),
        db=db,
        tls=Tls(tls_ca_file, tls_cert_file, tls_key_file, tls_check_hostname) if tls else None,
        login=_login("password", username, password_env, password_file),
        sentinel_login=_login(
            "sentinel_password", sentinel_username, sentinel_password_env, sentinel_password_file
        ),
        key_prefix=key_prefix,
        ttl_s=ttl_s,
        read_from=read_from,
        connections=connections,
        pipeline_bytes=pipeline_bytes,
        timeout_s=timeout_s,
    )


def _login(what: str, username: str | None, variable: str | None, path: str | os.PathLike[str] | None) -> Login:
    password = read_secret(f"redis {what}", variable, None if path is None else Path(path), os.environ)
    if username is not None and password is None:
        raise ConfigError(f"backend redis: a user name goes with {what}_env or {what}_file")
    return Login(username, password)


def open_redis_backend(codec: FrameCodec, **options: Any) -> RedisBackend:
    """The factory behind the name `redis`: takes the options of `redis_options`, and raises as it and RedisBackend."""
    return RedisBackend(codec, redis_options(**options))
