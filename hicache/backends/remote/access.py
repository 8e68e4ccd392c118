"""The address and credentials of a daemon, from the configuration, with secrets read."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...config.addresses import HTTP_PORTS, default_socket, split_url
from ...config.files import require_readable
from ...config.remote_storage import RemoteStorageOptions
from ...config.secret import read_secret
from ...errors import ConfigError
from ..http import Server

# Over a Unix socket the kernel reports at once that a daemon has died. For one that hangs, see `frames`.
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Access:
    """`headers` are sent with each request. `lock` is the file that a daemon on this host keeps locked while it runs,
    None for a daemon on another host. `where` is for messages."""

    server: Server
    headers: Mapping[str, str] = field(repr=False)
    lock: Path | None
    where: str


def open_access(options: RemoteStorageOptions, environ: Mapping[str, str] | None = None) -> Access:
    """Read the secrets of `options`. Raises ConfigError for an unreadable one, and if the daemon's address is
    unknown."""
    environ = os.environ if environ is None else environ
    token = read_secret("remote storage: token", options.token_env, options.token_file, environ)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if options.url is None:
        path = options.socket or default_socket()
        if path is None:
            raise ConfigError("remote storage: set socket or url; the default needs XDG_RUNTIME_DIR, which is not set")
        server = Server("", 0, None, "", "", options.connect_timeout, _NEVER_S, os.fspath(path))
        return Access(server, {"host": "localhost", **headers}, path.parent / "lock", str(path))
    url = split_url(options.url, HTTP_PORTS)
    tls = _tls(options) if url.scheme == "https" else None
    server = Server(url.host, url.port, tls, url.host, "", options.connect_timeout, options.timeout)
    return Access(server, {"host": options.url.split("/")[2], **headers}, None, options.url)


def _tls(options: RemoteStorageOptions) -> ssl.SSLContext:
    for name in ("ca_file", "certificate", "key"):
        file: Path | None = getattr(options, name)
        if file is not None:
            require_readable(file, f"remote storage: {name}")
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        if options.certificate is not None:
            context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("remote storage: ca_file, certificate or key is not usable for TLS") from error
    return context
