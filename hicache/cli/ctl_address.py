"""The address for `hicache ctl`: a socket, a URL, or a configuration that names them. A configuration with
`admin.socket` is an engine's, any other a daemon's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..backends.rotated import Rotated
from ..config import HiCacheConfig, load_config
from ..config.addresses import default_socket
from ..config.secret import read_secret
from ..errors import ConfigError, InvalidInput
from .ctl_client import Endpoint


@dataclass(frozen=True, slots=True)
class Address:
    """The address options of `ctl`."""

    socket: Path | None
    url: str | None
    config_file: Path | None
    token_file: Path | None
    ca_file: Path | None
    certificate: Path | None
    key: Path | None

    def endpoint(self) -> Endpoint:
        """Return the endpoint. Raises InvalidInput and ConfigError."""
        if sum(given is not None for given in (self.socket, self.url)) > 1:
            raise InvalidInput("pass one of --socket and --url, not both")
        if self.url is not None:
            return Endpoint(url=self.url, ca_file=self.ca_file, certificate=self.certificate, key=self.key)
        if self.socket is not None:
            return Endpoint(self.socket)
        config = self._config()
        socket = None if config is None else config.admin.socket or config.daemon.socket
        socket = socket or default_socket()
        if socket is None:
            raise ConfigError("the system has no directory for this user's sockets (XDG_RUNTIME_DIR); pass --socket")
        return Endpoint(socket)

    def token(self) -> Rotated[str | None]:
        """Return the admin token, from --token-file or the configuration, or None. Raises ConfigError."""
        variable, path = None, self.token_file
        config = self._config() if path is None else None
        if config is not None and config.admin.socket is not None:
            variable, path = config.admin.token_env, config.admin.token_file
        elif config is not None:
            variable, path = config.daemon.admin_token_env, config.daemon.admin_token_file
        return Rotated("admin token", [path], lambda: read_secret("admin token", variable, path, os.environ))

    def _config(self) -> HiCacheConfig | None:
        if self.config_file is None:
            return None
        return load_config(self.config_file, environ=os.environ)
