"""A daemon of its own: `hicache serve` over a file store, and the side door to the pages that it stores."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend
from hicache.backends.envelope import Wrapper
from hicache.backends.remote import RemoteBackend
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES, Store
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.devservers.ports import LOOPBACK, free_ports
from hicache.frame import FrameCodec, PageBuffer, PageView
from hicache.shared_memory import Layout, SharedMemory
from tests.backends._files import page_path
from tests.waiting import WAIT_S, wait_for

ROOT = Path(__file__).resolve().parents[3]
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
TOKEN = "a-token-of-clients-" + "1" * 20


class Daemon:
    """A process in `folder`, which has its socket, its log and its store. `entries` are sections of its configuration;
    `storage_guard` is the guard of the store."""

    def __init__(self, folder: Path, **entries: Any) -> None:
        self.folder = folder
        self.socket = folder / "run/daemon.sock"
        self.store = folder / "store"
        self.port = free_ports(1)[0]
        self._token = folder / "token"
        self._token.write_text(TOKEN)
        self._token.chmod(0o600)
        self._config = folder / "daemon.yaml"
        self.configure(**entries)
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **entries: Any) -> None:
        """Write the configuration of the next start: entries of `daemon`, and whole other sections."""
        daemon = {
            "socket": str(self.socket), "listen": f"{LOOPBACK}:{self.port}", "token_file": str(self._token),
            "pool": 0, "staging": "64MiB", **entries.pop("daemon", {}),
        }  # fmt: skip
        options = {"path": str(self.store), "capacity": None, "free_space_floor": 0}
        storage = {"type": "file", "options": options, "guard": entries.pop("storage_guard", {})}
        self._config.write_text(yaml.safe_dump({"daemon": daemon, "storage": storage, **entries}))

    def start(self) -> None:
        """Start it and wait until it takes requests."""
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "hicache", "serve", "-c", str(self._config)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_for(self.is_ready, self._require_running)

    def is_ready(self) -> bool:
        """True if it takes requests."""
        try:
            return self._ask("/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def status(self) -> Any:
        """Return its snapshot."""
        return json.loads(self._ask("/statusz")[1])

    def requests(self) -> dict[str, int]:
        """How many requests were answered with 200, by operation."""
        return {operation: by_status.get("200", 0) for operation, by_status in self.status()["requests"].items()}

    def _ask(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(str(self.socket))
            connection.sock = sock
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _require_running(self) -> None:
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, if it runs, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)
            self.process = None

    def options(self, *, tcp: bool = False, port: int | None = None, **options: Any) -> RemoteStorageOptions:
        """Options of a backend on this daemon."""
        if tcp:
            url = f"http://{LOOPBACK}:{port or self.port}"
            return RemoteStorageOptions(url=url, token_file=self._token, **options)
        return RemoteStorageOptions(socket=self.socket, **options)

    def door(self, backend: StorageBackend, codec: FrameCodec = CODEC) -> Store:
        """A backend and the side door to the page files of the daemon's store."""

        def read(key: bytes) -> bytes | None:
            path = page_path(self.store, codec, key)
            return path.read_bytes() if path.exists() else None

        return Store(backend, read, lambda key, data: _write(page_path(self.store, codec, key), data))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


class Frames:
    """Shared memory of `count` frames of this process, and which of them are in use."""

    def __init__(self, count: int, frame_bytes: int = CODEC.frame_bytes) -> None:
        layout = Layout(0, count, frame_bytes, b"s" * 32)
        name = f"test-remote-{os.getpid()}-{frame_bytes}"
        self.memory = SharedMemory.open(name, layout, deadline=time.monotonic() + WAIT_S)
        self._free = list(range(count))
        self._changed = threading.Condition()

    def frame(self, number: int) -> memoryview:
        """One frame."""
        size = self.memory.layout.frame_bytes
        return self.memory.frames[number * size : (number + 1) * size]

    @contextlib.contextmanager
    def lent(self, count: int) -> Iterator[list[memoryview]]:
        """Frames that nobody else uses meanwhile."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._free) >= count, WAIT_S)
            numbers = [self._free.pop() for _ in range(count)]
        try:
            yield [self.frame(number) for number in numbers]
        finally:
            with self._changed:
                self._free += numbers
                self._changed.notify_all()

    def close(self) -> None:
        """Remove the name. The memory goes with its last view."""
        self.memory.unlink()


class ThroughFrames(Wrapper):
    """A `remote` backend for callers with private frames: each page goes through a frame of shared memory. What the
    daemon does not write in a frame is what an earlier page has left there."""

    def __init__(self, inner: RemoteBackend, frames: Frames) -> None:
        super().__init__(inner)
        self._frames = frames

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        with self._frames.lent(len(pages)) as lent:
            outcomes = super().get(keys, lent, deadline)
            for page, frame, outcome in zip(pages, lent, outcomes, strict=True):
                if outcome is GetOutcome.HIT:
                    _copy(frame, page)
        return outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. The header that sealing has written is handed on."""
        with self._frames.lent(len(pages)) as lent:
            for page, frame in zip(pages, lent, strict=True):
                _copy(page, frame)
            outcomes = super().put(keys, lent, parent, deadline)
            for page, frame in zip(pages, lent, strict=True):
                _copy(frame, page)
        return outcomes


def _copy(source: PageBuffer, target: PageBuffer) -> None:
    if isinstance(source, PageView):
        assert isinstance(target, memoryview)
        target[source.nbytes :] = bytes(target.nbytes - source.nbytes)
        source.gather(target)
    elif isinstance(target, PageView):
        target.scatter(source)
    else:
        target[:] = source
