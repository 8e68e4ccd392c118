"""A daemon with two stores, its admin surface, and its engines."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.storage import Storage
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, empty_frames, full_frames, holds
from tests.daemon import daemons
from tests.waiting import WAIT_S, wait_for

PAYLOAD_BYTES = 16 << 10
ADMIN_TOKEN, DATA_TOKEN = "for-operators-" + "1" * 20, "for-engines-" + "2" * 20


def keys_of(count: int, first: int = 0) -> list[bytes]:
    """Return page keys of a chain."""
    return [hashlib.sha256(bytes([number])).digest() for number in range(first, first + count)]


class Daemon(daemons.Daemon):
    """`hicache serve` with a pool and two stores, `ram` and `disk`. `section` adds entries to the section `daemon`."""

    def __init__(self, folder: Path, **section: Any) -> None:
        folder.mkdir(exist_ok=True)
        parts = [
            {"name": "ram", "type": "memory", "options": {}},
            {"name": "disk", "type": "file", "options": {"path": str(folder / "store"), "free_space_floor": "0B"}},
        ]
        storage = {"type": "levels", "options": {"levels": parts}}
        super().__init__(folder, {"pool": "8MiB", **section}, storage=storage)
        self._backends: list[Storage] = []

    def __exit__(self, *exc_info: object) -> None:
        for backend in self._backends:
            backend.close()
        try:
            assert self.stop() == 0, self.log
        finally:
            self.kill()

    def admin(self, method: str, target: str, body: object = None, code: int = 200, token: str | None = None) -> Any:
        """Make one request to its admin surface. Return the document. Fails if the status is not `code`."""
        status, answer = self.ask(method, f"/v1/admin{target}", body, token)
        assert status == code, (answer, self.log)
        return answer

    def job(self, target: str, body: object) -> Any:
        """Start a job, wait for its end, and return its description."""
        job = self.admin("POST", target, body, 202)
        wait_for(lambda: self.admin("GET", f"/jobs/{job['id']}")["state"] in ("done", "failed", "cancelled"))
        return self.admin("GET", f"/jobs/{job['id']}")

    def places(self, keys: list[bytes], **body: Any) -> list[list[str]]:
        """Return for each page where it is."""
        fields = {"keys": [key.hex() for key in keys], **body}
        return [page["places"] for page in self.admin("POST", "/lookup", fields)["pages"]]

    def engine(self, namespace: int) -> Engine:
        """Return an engine in the namespace whose digest is this byte 32 times."""
        codec = FrameCodec(bytes([namespace]) * 32, PAYLOAD_BYTES, label=f"model-{namespace:02x}")
        backend = open_spec(BackendSpec("remote", {"socket": self.socket}), codec)
        self._backends.append(backend)
        return Engine(backend)


class Engine:
    """An engine that stores and reads pages whose bytes derive from their keys."""

    def __init__(self, backend: Storage) -> None:
        self.backend = backend

    def store(self, keys: list[bytes]) -> None:
        """Store a chain. Fails unless every page is stored."""
        frames = full_frames(self.backend.codec, keys)
        outcomes = self.backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + WAIT_S)
        assert all(outcome.is_stored for outcome in outcomes), outcomes

    def read(self, keys: list[bytes]) -> int:
        """Read a chain and return the number of hits. Fails if a hit has wrong bytes."""
        frames = empty_frames(self.backend.codec, len(keys))
        outcomes = self.backend.batch_get(keys, frames, deadline=time.monotonic() + WAIT_S)
        for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
            assert outcome is not HIT or holds(self.backend.codec, key, frame)
        return outcomes.count(HIT)
