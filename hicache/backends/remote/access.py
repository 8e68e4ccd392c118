"""The address and credentials of a daemon, from the configuration, with secrets read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...config.addresses import HTTP_PORTS, default_socket, split_url
from ...config.remote_storage import RemoteStorageOptions
from ...config.secret import read_secret
from ...errors import ConfigError
from ..http import Server
from ..rotated import Rotated, client_tls

# Over a Unix socket the kernel reports at once that a daemon has died. For one that hangs, see `frames`.
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Access:
    """`host` and `token` are sent with each request. `lock` is the file that a daemon on this host keeps locked while
    it runs, None for a daemon on another host. `where` is for messages."""

    server: Server
    host: str
    token: Rotated[str | None] = field(repr=False)
    lock: Path | None
    where: str


def open_access(options: RemoteStorageOptions, environ: Mapping[str, str] | None = None) -> Access:
    """Read the secrets of `options`. Raises ConfigError for an unreadable one, and if the daemon's address is
    unknown."""
    environ = os.environ if environ is None else environ
    what = "remote storage: token"
    token = Rotated(
        what, [options.token_file], lambda: read_secret(what, options.token_env, options.token_file, environ)
    )
    if options.url is None:
        path = options.socket or default_socket()
        if path is None:
            raise ConfigError("remote storage: set socket or url; the default needs XDG_RUNTIME_DIR, which is not set")
        server = Server("", 0, None, "", "", options.connect_timeout, _NEVER_S, os.fspath(path))
        return Access(server, "localhost", token, path.parent / "lock", str(path))
    url = split_url(options.url, HTTP_PORTS)
    files = {"ca_file": options.ca_file, "certificate": options.certificate, "key": options.key}
    tls = client_tls("remote storage", files) if url.scheme == "https" else None
    server = Server(url.host, url.port, tls, url.host, "", options.connect_timeout, options.timeout)
    return Access(server, options.url.split("/")[2], token, None, options.url)
