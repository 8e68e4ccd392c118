"""A real daemon in a process of its own, raw bytes to its socket, and what it holds."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hicache.devservers.launcher import launch
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 30.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.resident_bytes / _MIB:.1f} MiB resident, {self.descriptors} descriptors, {self.threads} threads"


class Daemon:
    """`hicache serve` with `settings` in its section `daemon` and `storage`; a context manager. It is killed at the end
    if it has not ended before."""

    def __init__(self, folder: Path, storage: Mapping[str, Any] | None = None, **settings: Any) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.socket = folder / "run" / "daemon.sock"
        self.log = folder / "log"
        config = {
            "daemon": {"socket": str(self.socket), "pool": "8MiB", "staging": "8MiB", **settings},
            "storage": storage or {"type": "memory"},
        }
        path = folder / "daemon.yaml"
        path.write_text(yaml.safe_dump(config))
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MALLOC_ARENA_MAX": "1"}
        self.process = launch(
            [sys.executable, "-m", "hicache", "serve", "-c", str(path)], environ=environ, directory=folder, log=self.log
        )

    def __enter__(self) -> Daemon:
        wait_for(self._is_ready, timeout_s=START_S, pause_s=0.02)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def connect(self, timeout_s: float = 30.0) -> socket.socket:
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
        """Make one request; status and JSON."""
        with self.connect() as sock:
            sock.sendall(request(method, path, b"" if body is None else json.dumps(body).encode()))
            return answer_of(sock)

    def held(self) -> Held:
        """Return what the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return Held(int(fields["VmRSS"].split()[0]) * 1024, descriptors, int(fields["Threads"]))

    def until_quiet(self) -> None:
        """Wait until no connection and no request is left but the one that asks."""
        wait_for(lambda: self._counts() == (1, 1), pause_s=0.02)

    def _counts(self) -> tuple[int, int]:
        _, found = self.call("GET", "/statusz")
        return found["connections"], found["in_flight_requests"]

    def end(self) -> tuple[int, float]:
        """Send SIGTERM; the exit code, and how long it took."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(START_S)
        return code, time.monotonic() - began_s


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """One request, as bytes."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [
        "content-type: application/json",
        *(f"{name.replace('_', '-')}: {text}" for name, text in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer_of(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of one answer; status 0 if the server has hung up without one."""
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
