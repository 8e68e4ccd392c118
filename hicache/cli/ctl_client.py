"""The HTTP client of `hicache ctl`: one connection, one request at a time, typed answers."""

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
from ..backends.remote.causes import Entries, explain
from ..backends.rotated import client_tls
from ..config.addresses import HTTP_PORTS, split_url
from ..errors import AdminError, BackendUnavailable, ConfigError

Answer = TypeVar("Answer")

# A request of an operator waits for a scheduler or a store, seconds at most.
TIMEOUT_S = 70.0
CONNECT_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20
_OPTIONS = Entries("--socket, --url or -c FILE", "--url", "--ca-file", "--certificate and --key")
_NOT_AN_ADMIN_SURFACE = "is not an admin surface; correct --socket, --url or -c FILE"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an admin surface: a Unix socket, or a URL `http(s)://host:port`. `ca_file`, and `certificate` with
    its `key`, are for https."""

    socket: Path | None = None
    url: str = ""
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __str__(self) -> str:
        return self.url or str(self.socket)

    def server(self) -> Server:
        """Return the server for a ConnectionPool. Raises ConfigError."""
        if self.socket is not None:
            return Server("localhost", 0, None, "", "", CONNECT_TIMEOUT_S, TIMEOUT_S, os.fspath(self.socket))
        try:
            url = split_url(self.url, HTTP_PORTS)
        except ValueError as error:
            raise ConfigError(f"--url: {error}") from error
        if url.path.strip("/"):
            raise ConfigError("--url: the address must not have a path; write it as https://host:port")
        files = {"--ca-file": self.ca_file, "--certificate": self.certificate, "--key": self.key}
        tls = client_tls("ctl", files) if url.scheme == "https" else None
        return Server(url.host, url.port, tls, url.host, "", CONNECT_TIMEOUT_S, TIMEOUT_S)


class AdminClient:
    """A client of the admin surface at `endpoint`. `token` returns the current token, or None. Raises
    BackendUnavailable without an answer, and AdminError if the server rejects a request."""

    def __init__(self, endpoint: Endpoint, token: Callable[[], str | None]) -> None:
        self.endpoint = endpoint
        self._server = server = endpoint.server()
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
            head = request_head(method, f"/v1/admin{path}", headers)
            status, answer = self._pool.exchange(head, [memoryview(data)] if data else [], read, deadline,
                                                 may_repeat=method == "GET")  # fmt: skip
        except StoreError as error:
            raise self._unavailable(error) from error
        if 200 <= status < 300:
            return answer
        try:
            refusal = Refusal.model_validate_json(answer)
        except ValidationError:
            raise BackendUnavailable(f"{self.endpoint}: answers {status}, so it {_NOT_AN_ADMIN_SURFACE}") from None
        raise AdminError(refusal.error, refusal.detail)

    def _unavailable(self, error: StoreError) -> BackendUnavailable:
        why = explain(error, _OPTIONS, self._server)
        return BackendUnavailable(f"{self.endpoint}: {why}")

    def _typed(self, kind: type[Answer], data: bytes) -> Answer:
        try:
            return TypeAdapter(kind).validate_json(data or b"null")
        except ValidationError as error:
            if any(problem["type"] == "json_invalid" for problem in error.errors()):
                raise BackendUnavailable(f"{self.endpoint}: {_NOT_AN_ADMIN_SURFACE}") from error
            raise BackendUnavailable(
                f"{self.endpoint}: its answer is from another version ({error.error_count()} differences); use the ctl "
                "of its version"
            ) from error
