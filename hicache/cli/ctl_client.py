"""The HTTP client of `hicache ctl`: one connection, one request at a time, typed answers; and where it connects to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..admin.models import Refusal
from ..backends.errors import StoreError
from ..backends.http import Connection, ConnectionPool, Head, Server, read_small, request_head
from ..backends.remote.client import Entries, explain
from ..backends.rotated import Rotated, client_tls
from ..config import HiCacheConfig, load_config
from ..config.addresses import HTTP_PORTS, default_socket, split_url
from ..config.secret import read_secret
from ..errors import AdminError, BackendUnavailable, ConfigError, InvalidInput

Answer = TypeVar("Answer")

# A request of an operator waits for a scheduler or a store, seconds at most.
TIMEOUT_S = 70.0
CONNECT_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
_OPTIONS = Entries("--socket, --url or -c FILE", "--url", "--ca-file", "--certificate and --key")
_NOT_AN_ADMIN_SURFACE = "is not an admin surface; correct --socket, --url or -c FILE"


@dataclass(frozen=True, slots=True)
class Address:
    """The address options of `ctl`: a Unix socket, a URL `http(s)://host:port`, or a configuration that names them. One
    with `admin.socket` is an engine's, any other a daemon's. `ca_file`, and `certificate` with its `key`, are for
    https."""

    socket: Path | None = None
    url: str | None = None
    config_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def server(self) -> Server:
        """Return the server for a ConnectionPool. Raises InvalidInput and ConfigError."""
        if self.url is None:
            path = os.fspath(self._socket())  # root operates the daemons of other users
            return Server("localhost", 0, None, "", "", CONNECT_TIMEOUT_S, TIMEOUT_S, path, of_any_user=True)
        if self.socket is not None:
            raise InvalidInput("pass one of --socket and --url, not both")
        try:
            url = split_url(self.url, HTTP_PORTS)
        except ValueError as error:
            raise ConfigError(f"--url: {error}") from error
        if url.path.strip("/"):
            raise ConfigError("--url: the address must not have a path; write it as https://host:port")
        files = {"--ca-file": self.ca_file, "--certificate": self.certificate, "--key": self.key}
        tls = client_tls("ctl", files) if url.scheme == "https" else None
        return Server(url.host, url.port, tls, url.host, "", CONNECT_TIMEOUT_S, TIMEOUT_S)

    def _socket(self) -> Path:
        config = self._config() if self.socket is None else None
        configured = None if config is None else config.admin.socket or config.daemon.socket
        socket = self.socket or configured or default_socket()
        if socket is None:
            raise ConfigError("the system has no directory for this user's sockets (XDG_RUNTIME_DIR); pass --socket")
        return socket

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


class AdminClient:
    """A client of the admin surface at an address, `where` for messages. `token` returns the current token, or None.
    Raises BackendUnavailable without an answer, and AdminError if the server rejects a request."""

    def __init__(self, address: Address, token: Callable[[], str | None]) -> None:
        self._server = server = address.server()
        self.where = address.url or server.socket
        self._pool = ConnectionPool(server)
        self._headers = {"host": f"{server.host}:{server.port}", "content-type": "application/json"}
        self._token = token

    def get(self, path: str, kind: type[Answer]) -> Answer:
        """Return the answer to a GET, as `kind`."""
        return self._typed(kind, self._ask("GET", path, None))

    def post(self, path: str, body: BaseModel | dict[str, Any], kind: type[Answer]) -> Answer:
        """Return the answer to a POST."""
        return self._typed(kind, self._ask("POST", path, body))

    def put(self, path: str, body: BaseModel | dict[str, Any]) -> None:
        """Send a PUT."""
        self._ask("PUT", path, body)

    def delete(self, path: str) -> None:
        """Send a DELETE."""
        self._ask("DELETE", path, None)

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()

    def _ask(self, method: str, path: str, body: BaseModel | dict[str, Any] | None) -> bytes:
        text = "" if body is None else body.model_dump_json() if isinstance(body, BaseModel) else json.dumps(body)
        data = text.encode()
        deadline = time.monotonic() + TIMEOUT_S

        def read(connection: Connection, head: Head) -> tuple[int, bytes]:
            return head.status, read_small(connection, head, _ANSWER_BYTES_MAX, deadline)

        try:
            token = self._token()
            login = {} if token is None else {"authorization": f"Bearer {token}"}
            headers = {**self._headers, **login, "content-length": str(len(data))}
            head = request_head(method, path if path.startswith("/v1/") else f"/v1/admin{path}", headers)
            status, answer = self._pool.exchange(head, [memoryview(data)] if data else [], read, deadline,
                                                 may_repeat=method == "GET")
        except StoreError as error:
            why = explain(error, _OPTIONS, self._server)
            raise BackendUnavailable(f"{self.where}: {why}") from error
        if 200 <= status < 300:
            return answer
        try:
            refusal = Refusal.model_validate_json(answer)
        except ValidationError:
            raise BackendUnavailable(f"{self.where}: answers {status}, so it {_NOT_AN_ADMIN_SURFACE}") from None
        raise AdminError(refusal.error, refusal.detail)

    def _typed(self, kind: type[Answer], data: bytes) -> Answer:
        try:
            return TypeAdapter(kind).validate_json(data or b"null")
        except ValidationError as error:
            if any(problem["type"] == "json_invalid" for problem in error.errors()):
                raise BackendUnavailable(f"{self.where}: {_NOT_AN_ADMIN_SURFACE}") from error
            raise BackendUnavailable(
                f"{self.where}: its answer is from another version ({error.error_count()} differences); use the ctl "
                "of its version"
            ) from error
