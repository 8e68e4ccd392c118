"""Where a daemon is and how it is entered: what the section of the configuration says, with secrets read."""

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

# Over a Unix socket the kernel tells at once that a daemon has died. One that hangs is waited for, see `frames`.
_NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Access:
    """`headers` go with each request. `lock` is the file that a daemon on this host holds locked for its life, None for
    a daemon on another host. `where` is for messages."""

    server: Server
    headers: Mapping[str, str] = field(repr=False)
    lock: Path | None
    where: str


def open_access(options: RemoteStorageOptions, environ: Mapping[str, str] | None = None) -> Access:
    """Read the secrets that `options` name. Raises ConfigError for one that cannot be read, and if it is not known
    where the daemon listens."""
    environ = os.environ if environ is None else environ
    token = read_secret("remote storage: token", options.token_env, options.token_file, environ)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if options.url is None:
        path = options.socket or default_socket()
        if path is None:
            raise ConfigError("remote storage: give socket or url: XDG_RUNTIME_DIR is not set, so there is no default")
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
        raise ConfigError("remote storage: ca_file, certificate or key hold nothing that TLS can use") from error
    return context
