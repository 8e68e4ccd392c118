"""A real daemon, `hicache serve` over a file store, with direct access to its stored pages."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hicache.backends.base import GetOutcome
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.remote import RemoteDriver
from hicache.backends.storage import Storage
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec, PageBuffer, PageView
from hicache.shared_memory import Layout, SharedMemory
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, Subject
from hicache_lab.devservers.ports import LOOPBACK
from hicache_lab.faults import spoiled
from tests.backends._files import page_path
from tests.daemon import daemons
from tests.waiting import WAIT_S

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
TOKEN = "a-token-of-clients-" + "1" * 20


class Daemon(daemons.Daemon):
    """A daemon over a file store, with a token for TCP; `faults` are those of the store."""

    @property
    def store(self) -> Path:
        """Return the directory of its store."""
        return self.folder / "store"

    def configure(self, daemon: Mapping[str, Any] | None = None, **sections: Any) -> None:
        """See daemons.Daemon."""
        entries = {"token_file": self.secret("token", TOKEN), "pool": 0, "staging": "64MiB", **(daemon or {})}
        options = {"path": str(self.store), "capacity": None, "free_space_floor": 0}
        storage = spoiled({"type": "file", "options": options}, **sections.pop("faults", {}))
        super().configure(entries, **{"storage": storage, **sections})

    def requests(self) -> dict[str, int]:
        """Return the number of requests answered with 200, by operation."""
        return {operation: by_status.get("200", 0) for operation, by_status in self.status()["requests"].items()}

    def options(self, *, tcp: bool = False, port: int | None = None, **options: Any) -> RemoteStorageOptions:
        """Return options of a backend for this daemon."""
        if tcp:
            url = f"http://{LOOPBACK}:{port or self.port}"
            return RemoteStorageOptions(url=url, token_file=self.folder / "token", **options)
        return RemoteStorageOptions(socket=self.socket, **options)

    def door(self, backend: Storage, codec: FrameCodec = CODEC) -> Subject:
        """Return `backend` with direct access to the page files of the daemon's store."""

        def read(key: bytes) -> bytes | None:
            path = page_path(self.store, codec, key)
            return path.read_bytes() if path.exists() else None

        return Subject(backend, read, lambda key, data: _write(page_path(self.store, codec, key), data))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


class Frames:
    """Shared memory of this process with `count` frames; tracks which frames are in use."""

    def __init__(self, count: int, frame_bytes: int = CODEC.frame_bytes) -> None:
        layout = Layout(0, count, frame_bytes, b"s" * 32)
        name = f"test-remote-{os.getpid()}-{frame_bytes}-{count}"
        self.memory = SharedMemory.open(name, layout, deadline=time.monotonic() + WAIT_S)
        self._free = list(range(count))
        self._changed = threading.Condition()

    def frame(self, number: int) -> memoryview:
        """Return one frame."""
        size = self.memory.layout.frame_bytes
        return self.memory.frames[number * size : (number + 1) * size]

    @contextlib.contextmanager
    def lent(self, count: int) -> Iterator[list[memoryview]]:
        """Reserve frames for the block."""
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
        """Remove the name. The memory is freed with its last view."""
        self.memory.unlink()


class ThroughFrames(RemoteDriver):
    """A `remote` driver for callers with private frames: each page goes through a frame of shared memory. Bytes that
    the daemon does not write are those of an earlier page."""

    def __init__(self, codec: FrameCodec, options: RemoteStorageOptions, frames: Frames) -> None:
        super().__init__(codec, options)
        self._frames = frames
        self.register_memory(frames.memory.frames)

    def read(self, pages: PageReads[bool]) -> None:
        """See Driver."""
        private = pages.pages
        with self._frames.lent(len(private)) as pages.pages:
            super().read(pages)
            for position, (page, frame) in enumerate(zip(private, pages.pages, strict=True)):
                if pages.outcome(position) is GetOutcome.HIT:
                    _copy(frame, page)
        pages.pages = private

    def write(self, pages: PageWrites) -> None:
        """See Driver. Copies the header that sealing has written back to the page."""
        private = pages.pages
        with self._frames.lent(len(private)) as pages.pages:
            for page, frame in zip(private, pages.pages, strict=True):
                _copy(page, frame)
            super().write(pages)
            for page, frame in zip(private, pages.pages, strict=True):
                _copy(frame, page)
        pages.pages = private


def _copy(source: PageBuffer, target: PageBuffer) -> None:
    if isinstance(source, PageView):
        assert isinstance(target, memoryview)
        target[source.nbytes :] = bytes(target.nbytes - source.nbytes)
        source.gather(target)
    elif isinstance(target, PageView):
        target.scatter(source)
    else:
        target[:] = source
