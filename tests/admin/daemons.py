"""A real daemon in a process of its own, and engines' side of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend
from hicache.backends.registry import BackendSpec, open_spec
from hicache.frame import HEADER_BYTES, FrameCodec
from tests.admin.running import ask
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD_BYTES = 16 << 10
ADMIN_TOKEN, DATA_TOKEN = "for-operators-" + "1" * 20, "for-engines-" + "2" * 20


def keys_of(count: int, first: int = 0) -> list[bytes]:
    """Page keys of a chain."""
    return [hashlib.sha256(bytes([number])).digest() for number in range(first, first + count)]


class Daemon:
    """`hicache serve` with two stores, `ram` and `disk`, and a pool of `pool` bytes; `section` adds to `daemon`."""

    def __init__(self, folder: Path, pool: str = "8MiB", **section: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.socket = folder / "sockets" / "daemon.sock"
        self.config_file = folder / "daemon.yaml"
        self.log = folder / "log"
        parts = [
            {"name": "ram", "type": "memory", "options": {}},
            {"name": "disk", "type": "file", "options": {"path": str(folder / "store"), "free_space_floor": "0B"}},
        ]
        self.config_file.write_text(yaml.safe_dump({
            "daemon": {"socket": str(self.socket), "pool": pool, "staging": "4MiB", **section},
            "storage": {"type": "levels", "options": {"levels": parts}},
        }))  # fmt: skip
        self._backends: list[StorageBackend] = []

    def secret(self, name: str, text: str) -> str:
        """A private file with a token."""
        path = self.folder / name
        path.write_text(f"{text}\n")
        path.chmod(0o600)
        return str(path)

    def __enter__(self) -> Self:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "hicache", "serve", "-c", str(self.config_file)]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        wait_for(self._is_up)
        return self

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return ask(self.socket, "GET", "/status")[0] in (200, 403)
        except OSError:
            return False

    def __exit__(self, *exc_info: object) -> None:
        for backend in self._backends:
            backend.close()
        self._process.terminate()
        try:
            assert self._process.wait(30) == 0, self.log.read_text()
        finally:
            self._process.kill()

    def ask(self, method: str, target: str, body: object = None, code: int = 200, token: str | None = None) -> Any:
        """One request to its admin surface, which is answered with `code`; the document."""
        status, answer = ask(self.socket, method, target, body, token)
        assert status == code, (answer, self.log.read_text())
        return answer

    def job(self, target: str, body: object) -> Any:
        """A job, to its end."""
        job = self.ask("POST", target, body, 202)
        wait_for(lambda: self.ask("GET", f"/jobs/{job['id']}")["state"] in ("done", "failed", "cancelled"))
        return self.ask("GET", f"/jobs/{job['id']}")

    def places(self, keys: list[bytes], **body: Any) -> list[list[str]]:
        """Where pages are."""
        asked = {"keys": [key.hex() for key in keys], **body}
        return [page["places"] for page in self.ask("POST", "/lookup", asked)["pages"]]

    def engine(self, namespace: int) -> Engine:
        """An engine of the namespace whose digest is 32 of these bytes."""
        codec = FrameCodec(bytes([namespace]) * 32, PAYLOAD_BYTES, label=f"model-{namespace:02x}")
        backend = open_spec(BackendSpec("remote", {"socket": self.socket}), codec)
        self._backends.append(backend)
        return Engine(backend)


class Engine:
    """Stores and reads pages whose bytes derive from their keys."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend

    def store(self, keys: list[bytes]) -> None:
        """Store a chain, all of it."""
        frames = [self._frame(key) for key in keys]
        outcomes = self.backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + 30)
        assert set(outcomes) <= {SetOutcome.STORED, SetOutcome.PRESENT}, outcomes

    def read(self, keys: list[bytes]) -> int:
        """Read a chain; how many pages of it were hits, all of which are right."""
        frames = [memoryview(bytearray(self.backend.codec.frame_bytes)) for _ in keys]
        outcomes = self.backend.batch_get(keys, frames, deadline=time.monotonic() + 30)
        for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
            if outcome is GetOutcome.HIT:
                assert frame[HEADER_BYTES:][:PAYLOAD_BYTES] == self._frame(key)[HEADER_BYTES:][:PAYLOAD_BYTES]
        return outcomes.count(GetOutcome.HIT)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the daemon does in the background."""
        wait_for(condition)

    def _frame(self, key: bytes) -> memoryview:
        frame = bytearray(self.backend.codec.frame_bytes)
        frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = hashlib.shake_128(key).digest(PAYLOAD_BYTES)
        return memoryview(frame)
