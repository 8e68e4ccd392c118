"""A real daemon in a separate process, plain HTTP clients of it, and the shared memory of an engine."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.shared_memory import Layout, SharedMemory
from hicache_lab.devservers.launcher import launch, suspend
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.waiting import WAIT_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "ab" * 32
PAYLOAD_BYTES = 12000
CODEC = FrameCodec(bytes.fromhex(NAMESPACE), PAYLOAD_BYTES, weights_epoch=3, label="tests")
FRAME_BYTES = CODEC.frame_bytes
TOKEN = "token-of-the-engines-in-tests"


class Client(http.client.HTTPConnection):
    """A connection to a daemon's Unix socket, or over TCP with `port`."""

    def __init__(self, path: Path | None, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(LOOPBACK, port, timeout=WAIT_S)
        self._path = path
        self._tls = tls

    def connect(self) -> None:
        if self._path is None:
            super().connect()
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname="localhost")
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(self._path))

    def call(self, method: str, target: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """Make one request and return the status and the body, decoded if it is JSON. Bytes and text are sent as they
        are, other bodies as JSON."""
        answer, content = self.call_with_headers(method, target, body, token)
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(content or b"null") if is_json else content

    def call_with_headers(
        self, method: str, target: str, body: Any = None, token: str | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Make one request as `call` does. Return the response, for its headers, and its body as bytes."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        if body is not None and not isinstance(body, bytes):
            body = body if isinstance(body, str) else json.dumps(body)
            headers["content-type"] = "application/json"
        self.request(method, target, body, headers)
        answer = self.getresponse()
        return answer, answer.read()

    def verb(self, verb: str, namespace: str = NAMESPACE, /, **fields: Any) -> tuple[int, Any]:
        """Call a verb of a namespace. `fields` are those of its body; `keys` are bytes."""
        body = {"timeout_s": WAIT_S, **fields}
        if "keys" in body:
            body["keys"] = [key.hex() for key in body["keys"]]
        return self.call("POST", f"/v1/namespaces/{namespace}/{verb}", body)

    def open(self, namespace: str = NAMESPACE, payload_bytes: int = PAYLOAD_BYTES) -> tuple[int, Any]:
        """Open a namespace."""
        fields = {"payload_bytes": payload_bytes, "weights_epoch": 3, "label": "tests"}
        return self.call("PUT", f"/v1/namespaces/{namespace}", fields)


class Daemon:
    """`hicache serve` in `folder`. `daemon` adds entries to the section `daemon`; `sections` are whole other
    sections."""

    module = "hicache"

    def __init__(self, folder: Path, daemon: Mapping[str, Any] | None = None, **sections: Any) -> None:
        self.folder = folder
        self.socket = folder / "run" / "daemon.sock"
        self.port = free_ports(1)[0]
        self.config_file = folder / "daemon.yaml"
        self.log_file = folder / "log"
        self.environ: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.configure(daemon, **sections)

    def configure(self, daemon: Mapping[str, Any] | None = None, **sections: Any) -> None:
        """Write the configuration for the next start or reload."""
        entries = {"socket": str(self.socket), "listen": f"{LOOPBACK}:{self.port}", "pool": "4MiB",
                   "staging": "4MiB", **(daemon or {})}
        content = {"daemon": entries, "storage": {"type": "memory"}, **sections}
        self.config_file.write_text(yaml.safe_dump(content))

    def secret(self, name: str, text: str) -> str:
        """Write a secret into its directory, as `secret` does."""
        return secret(self.folder, name, text)

    @property
    def log(self) -> str:
        """Return the daemon's log."""
        return self.log_file.read_text()

    def launch(self) -> None:
        """Start the process. Does not wait until it serves."""
        command = [sys.executable, "-m", self.module, "serve", "-c", str(self.config_file)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **self.environ}
        self.process = launch(command, environ=environ, directory=self.folder, log=self.log_file)

    def start(self) -> Self:
        """Start the process and wait until it serves requests."""
        self.launch()
        wait_for(self.is_ready)
        return self

    def is_ready(self) -> bool:
        """Return True if it serves requests. Fails if the process has ended."""
        assert self.process is not None and self.process.poll() is None, self.log
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def client(self) -> Client:
        """Return a connection to its Unix socket."""
        return Client(self.socket)

    def tcp(self, tls: ssl.SSLContext | None = None) -> Client:
        """Return a connection to its TCP address."""
        return Client(None, self.port, tls)

    def ask(self, method: str, target: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """Make one request over a new connection."""
        with contextlib.closing(self.client()) as client:
            return client.call(method, target, body, token)

    def status(self) -> Any:
        """Return its `/statusz`."""
        return self.ask("GET", "/statusz")[1]

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def pause(self) -> None:
        """Suspend the process, until it gets SIGCONT."""
        assert self.process is not None
        suspend(self.process.pid)

    def wait(self) -> int:
        """Wait until the process ends. Return its exit code."""
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def stop(self) -> int:
        """End the process as systemd does. Return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class EngineMemory:
    """Shared memory of an engine, for a daemon to map."""

    def __init__(self, pages: int = 32, frame_bytes: int = FRAME_BYTES) -> None:
        self.name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.shared = SharedMemory.open(
            self.name, Layout(0, pages, frame_bytes, bytes(32)), deadline=time.monotonic() + WAIT_S
        )
        self.pages = pages
        self.frame_bytes = frame_bytes

    def frame(self, number: int) -> memoryview:
        """Return one frame."""
        return self.shared.frames[number * self.frame_bytes : (number + 1) * self.frame_bytes]

    def attach(self, client: Client, **changed: Any) -> tuple[int, Any]:
        """Let the daemon map the memory. `changed` replaces fields of the request."""
        device, inode = self.shared.identity
        fields = {"frame_bytes": self.frame_bytes, "pages": self.pages, "device": device, "inode": inode}
        return client.call("PUT", f"/v1/memory/{self.name}", {**fields, **changed})

    def close(self) -> None:
        """Unmap the memory and remove its file."""
        self.shared.unlink()
        with contextlib.suppress(BufferError):
            self.shared.close()


def secret(folder: Path, name: str, text: str) -> str:
    """Write a file that only its owner can read. Return its path."""
    path = folder / name
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def keys_of(count: int, chain: str = "") -> list[bytes]:
    """Return page keys of a chain."""
    return [hashlib.sha256(f"{chain} {number}".encode()).digest() for number in range(count)]


def payload_of(key: bytes) -> bytes:
    """Return the payload of the test page with this key."""
    return hashlib.shake_128(key).digest(PAYLOAD_BYTES)


def sealed_page(key: bytes, parent: bytes | None = None, codec: FrameCodec = CODEC) -> bytes:
    """Return a page as a client sends it."""
    frame = memoryview(bytearray(codec.frame_bytes))
    frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload_of(key)
    return bytes(codec.seal(key, frame, parent=parent))


def write_body(keys: Sequence[bytes]) -> bytes:
    """Return the body of a `write`."""
    parents = [None, *keys]
    return b"".join(keys) + b"".join(sealed_page(key, parent) for key, parent in zip(keys, parents, strict=False))


def write(client: Client, keys: Sequence[bytes], token: str | None = None, body: bytes | None = None) -> Any:
    """Store pages, sent in the body."""
    target = f"/v1/namespaces/{NAMESPACE}/write?keys={len(keys)}&timeout_s=30"
    return client.call("POST", target, write_body(keys) if body is None else body, token)


def read(client: Client, keys: Sequence[bytes], token: str | None = None) -> Any:
    """Read pages, received in the body."""
    body = {"keys": [key.hex() for key in keys], "timeout_s": WAIT_S}
    return client.call("POST", f"/v1/namespaces/{NAMESPACE}/read", body, token)
