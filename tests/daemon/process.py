"""A daemon for hostile clients: raw bytes to its socket, and the resources of its process."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_S

from . import daemons

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a process."""

    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.resident_bytes / _MIB:.1f} MiB resident, {self.descriptors} descriptors, {self.threads} threads"


class Daemon(daemons.Daemon):
    """`hicache serve` with these entries of its section `daemon`, over `storage`; a context manager."""

    def __init__(self, folder: Path, storage: dict[str, Any] | None = None, **entries: Any) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        super().__init__(folder, entries, storage=storage or {"type": "memory"})
        self.environ = {"MALLOC_ARENA_MAX": "1"}  # the arenas of ended threads would hide growth

    def connect(self, timeout_s: float = WAIT_S) -> socket.socket:
        """Connect to the Unix socket."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(self.socket))
        except OSError:
            sock.close()
            raise
        return sock

    def call(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Make one request. Return status and JSON."""
        with self.connect() as sock:
            sock.sendall(request(method, path, b"" if body is None else json.dumps(body).encode()))
            return answer_of(sock)

    def resources(self) -> Resources:
        """Measure the resources of the process."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return Resources(int(fields["VmRSS"].split()[0]) * 1024, descriptors, int(fields["Threads"]))

    def end(self) -> tuple[int, float]:
        """Send SIGTERM. Return the exit code and the time until the end."""
        began_s = time.monotonic()
        return self.stop(), time.monotonic() - began_s


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return the bytes of one request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [
        "content-type: application/json",
        *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer_of(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of one answer. The status is 0 if the server has closed the connection without one."""
    with sock.makefile("rb") as file:
        try:
            first = file.readline().split()
            length = 0
            while (line := file.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            body = file.read(length)
        except ConnectionError:
            return 0, {}
    if len(first) < 2:
        return 0, {}
    found = json.loads(body) if body.startswith(b"{") else {}
    return int(first[1]), found
