"""The HTTP client of `hicache ctl`: one connection, one request at a time, typed answers."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..admin.models import Refusal
from ..errors import AdminError, BackendUnavailable, ConfigError

Answer = TypeVar("Answer")

# A request of an operator waits for a scheduler or a store for seconds at most.
TIMEOUT_S = 70.0
_ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the admin surface is: a Unix socket, or a URL `http(s)://host:port`. `ca_file`, and `certificate` with its
    `key`, are for https."""

    socket: Path | None = None
    url: str = ""
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __str__(self) -> str:
        return self.url or str(self.socket)

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection that is not open yet. Raises ConfigError."""
        if self.socket is not None:
            return _UnixConnection(self.socket)
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--url: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
            raise ConfigError(f"--url: {self.url[:80]!r} is not a valid address; write it as https://host:port")
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            context = ssl.create_default_context(cafile=None if self.ca_file is None else os.fspath(self.ca_file))
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca-file, --certificate, --key: cannot be used: {error}") from error
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


class AdminClient:
    """Asks the admin surface at `endpoint`. Raises BackendUnavailable if nobody answers there, and AdminError with what
    the other side refuses."""

    def __init__(self, endpoint: Endpoint, token: str | None) -> None:
        self.endpoint = endpoint
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, kind: type[Answer]) -> Answer:
        """Return the answer to a GET, as `kind`."""
        return self._typed(kind, self._ask("GET", path, None))

    def post(self, path: str, body: BaseModel | dict[str, Any], kind: type[Answer]) -> Answer:
        """Return the answer to a POST."""
        return self._typed(kind, self._ask("POST", path, body))

    def put(self, path: str, body: BaseModel | dict[str, Any]) -> None:
        """Put what is to hold."""
        self._ask("PUT", path, body)

    def delete(self, path: str) -> None:
        """Delete what is named."""
        self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: BaseModel | dict[str, Any] | None) -> bytes:
        text = None if body is None else body.model_dump_json() if isinstance(body, BaseModel) else json.dumps(body)
        connection = self.endpoint.connection()
        try:
            connection.request(method, f"/v1/admin{path}", text, self._headers)
            response = connection.getresponse()
            data = response.read(_ANSWER_BYTES_MAX)
            status = response.status
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error
        finally:
            connection.close()
        if 200 <= status < 300:
            return data
        try:
            refusal = Refusal.model_validate_json(data)
        except ValidationError:
            raise BackendUnavailable(
                f"{self.endpoint}: answers {status}, but not as an admin surface does; is it the right address?"
            ) from None
        raise AdminError(refusal.error, refusal.detail)

    def _unavailable(self, error: Exception) -> BackendUnavailable:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hint = "start it (`hicache serve`), or name another with --socket, --url or -c FILE"
        if isinstance(error, PermissionError):
            hint = "run this as the user who runs it"
        elif isinstance(error, ssl.SSLError):
            hint = "check --ca-file, --certificate and the name in the URL"
        elif isinstance(error, TimeoutError):
            reason, hint = "does not answer in time", "look at its log"
        return BackendUnavailable(f"{self.endpoint}: {reason}; {hint}")

    def _typed(self, kind: type[Answer], data: bytes) -> Answer:
        try:
            return TypeAdapter(kind).validate_json(data or b"null")
        except ValidationError as error:
            raise BackendUnavailable(
                f"{self.endpoint}: its answer is not that of this version ({error.error_count()} differences); use "
                "the ctl of its version"
            ) from error
