"""A well-behaved client beside hostile ones: it stores and reads its own pages all the time and compares every byte."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Self

from hicache.backends.remote import RemoteDriver
from hicache.backends.store import Store
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.frame import FrameCodec
from hicache.shared_memory import Layout, SharedMemory
from hicache_lab.conformance import HIT, full_frames, holds, make_keys, soon, store_of

from .process import Daemon

_PAGES = 4


class Beside:
    """A thread with two clients, one with shared memory and one without. `served` counts the batches with all pages
    right; the others are in `failures`. `latencies_s` has the latency of each batch."""

    def __init__(self, daemon: Daemon, payload_bytes: int = 100_000) -> None:
        codec = FrameCodec(bytes(31) + b"\7", payload_bytes)
        layout = Layout(0, _PAGES, codec.frame_bytes, bytes(32))
        self.memory = SharedMemory.open(f"beside-{os.getpid()}-{id(self)}", layout, deadline=time.monotonic() + 10.0)
        self._codec = codec
        options = RemoteStorageOptions(socket=daemon.socket, connections=2)
        self._clients = [store_of(RemoteDriver, codec, options) for _ in range(2)]
        self._clients[0].register_memory(self.memory.frames)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.served = 0
        self.failures: list[str] = []
        self.latencies_s: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(30.0)
        for client in self._clients:
            client.close()
        self.memory.unlink()

    def _run(self) -> None:
        size = self._codec.frame_bytes
        shared = [self.memory.frames[number * size : (number + 1) * size] for number in range(_PAGES)]
        own = [memoryview(bytearray(size)) for _ in range(_PAGES)]
        rounds = 0
        while not self._ended.is_set():
            rounds += 1
            for client, frames in zip(self._clients, (shared, own), strict=True):
                self._round(client, frames, make_keys(_PAGES, f"beside {rounds % 8}"))
            self._ended.wait(0.002)

    def _round(self, client: Store, frames: list[memoryview], keys: list[bytes]) -> None:
        for frame, full in zip(frames, full_frames(self._codec, keys), strict=True):
            frame[:] = full
        began_s = time.monotonic()
        stored = client.batch_set(keys, frames, parent=None, deadline=soon(10.0))
        for frame in frames:
            frame[:] = bytes(len(frame))
        found = client.batch_get(keys, frames, deadline=soon(10.0))
        self.latencies_s.append(time.monotonic() - began_s)
        is_whole = all(holds(self._codec, key, frame) for key, frame in zip(keys, frames, strict=True))
        if all(one.is_stored for one in stored) and found == [HIT] * len(keys) and is_whole:
            self.served += 1
        else:
            self.failures.append(f"{stored} {found} {is_whole} {client.statistics().errors}")

    def latency_s(self, share: float) -> float:
        """Return a quantile of the latencies: this share of the batches took no longer."""
        return sorted(self.latencies_s)[int(share * (len(self.latencies_s) - 1))]
