"""Storage as it is: slow, full, forgetful, damaged, wrong about what it has, and shared with others."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend
from hicache.backends.memory import MemoryBackend
from hicache.errors import BackendError
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.keys import Namespace
from tests.simulation.memory import JUNK, Finding
from tests.stamps import Stamps


class Surroundings(Protocol):
    """What storage needs from the simulation. `fault_rate` is per call or page."""

    random: random.Random
    stamps: Stamps
    fault_rate: float
    epoch: int  # of the weights in use

    def clock(self) -> float:
        """Simulated seconds."""

    def elsewhere(self) -> None:
        """Let others go on for a while."""

    def mishap(self) -> BaseException | None:
        """What goes wrong in a worker now, mostly nothing."""


class SimulatedStorage(MemoryBackend):
    """A memory backend with faults, and pauses before and after every page. It outlives those who close it.

    It keeps the contract: what is no HIT leaves rubbish in the frame, which nobody may use. Every frame that is stored
    is compared with what its page must be under the weights of `epoch`, and no call may come when nobody has it open.
    """

    def __init__(
        self, codec: FrameCodec, capacity_bytes: int, server: Stores, epoch: int, around: Surroundings
    ) -> None:
        super().__init__(codec, capacity_bytes)
        self.epoch = epoch
        self.users = 0
        self.known: set[bytes] = set()  # keys of all pages that were ever stored
        self._server = server
        self.random = around.random
        self._around = around
        self._pause = around.elsewhere
        self._sim_clock = around.clock
        self._stamps = around.stamps

    def close(self) -> None:
        self._pause()
        self._require_open()
        self.users -= 1

    def _require_open(self) -> None:
        if self.users < 1:
            raise Finding("books", f"the store of epoch {self.epoch} is used, or closed again, after it was closed")

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        self._require_open()
        self._pause()
        self._maybe_raise()
        if self._fault() or self._sim_clock() >= deadline:
            return 0
        if self._fault():
            return self.random.randint(0, len(keys))  # a stale index
        return super().batch_exists(keys, deadline=math.inf)

    def batch_get(self, keys: Sequence[bytes], pages: Sequence[Any], *, deadline: float) -> list[GetOutcome]:
        self._require_open()
        self._maybe_raise()
        outcomes = []
        for key, frame in zip(keys, pages, strict=True):
            frame[: HEADER_BYTES + self.codec.payload_bytes] = bytes([JUNK]) * (HEADER_BYTES + self.codec.payload_bytes)
            self._pause()
            outcome = GetOutcome.ERROR
            if self._fault():
                outcome = self.random.choice([GetOutcome.ERROR, GetOutcome.MISS, GetOutcome.CORRUPT])
            elif self._sim_clock() < deadline:
                outcome = super().batch_get([key], [frame], deadline=math.inf)[0]
            if outcome is not GetOutcome.HIT:
                frame[HEADER_BYTES : HEADER_BYTES + 16] = bytes([JUNK]) * 16
            outcomes.append(outcome)
            self._pause()
        self._maybe_raise()
        return outcomes

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[Any], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        self._require_open()
        if self.epoch != self._around.epoch:
            raise Finding("stale store", f"a store of epoch {self.epoch} began under epoch {self._around.epoch}")
        if not self._server.attached:
            raise Finding("stale store", "a store began at a server that the operator has detached")
        self._maybe_raise()
        outcomes: list[SetOutcome] = []
        for key, frame in zip(keys, pages, strict=True):
            self._pause()
            if self._fault() or self._sim_clock() >= deadline:
                outcomes.append(self.random.choice([SetOutcome.ERROR, SetOutcome.REJECTED]))
            else:
                self._require_right(key, frame)
                outcomes += super().batch_set([key], [frame], parent=parent, deadline=math.inf)
                self.known.add(key)
            parent = key
            self._pause()
        return outcomes

    def of_another_engine(self, keys: Sequence[bytes]) -> None:
        """Store the pages of a chain, head first, as another engine of the namespace does."""
        parent: bytes | None = None
        for key in keys:
            frame = bytearray(self.codec.frame_bytes)
            frame[HEADER_BYTES : HEADER_BYTES + self.codec.payload_bytes] = self._stamps.payload(key, self.epoch)
            super().batch_set([key], [memoryview(frame)], parent=parent, deadline=math.inf)
            self.known.add(key)
            parent = key

    def meddle(self) -> None:
        """Lose or damage one of the stored pages."""
        if not self._pages:
            return
        key = self.random.choice(list(self._pages))
        if self.random.random() < 0.5:
            self.delete([key], deadline=math.inf)
            return
        frame = bytearray(self._pages[key])
        frame[self.random.randrange(HEADER_BYTES + self.codec.payload_bytes)] ^= 1 << self.random.randrange(8)
        self._pages[key] = bytes(frame)

    def _require_right(self, key: bytes, frame: memoryview) -> None:
        if frame[HEADER_BYTES : HEADER_BYTES + self.codec.payload_bytes] != self._stamps.payload(key, self.epoch):
            raise Finding("wrong bytes", "a page was stored that is not the one its key names")

    def _fault(self) -> bool:
        return self._around.fault_rate > 0 and self.random.random() < self._around.fault_rate

    def _maybe_raise(self) -> None:
        if self._fault() and self.random.random() < 0.2:
            raise ConnectionError("the simulated store is away")


class Stores:
    """The stores of all epochs, as one server holds them, `pages` pages each. `attached` while the cache uses it."""

    def __init__(self, namespace: Namespace, pages: int, around: Surroundings) -> None:
        self.attached = False
        self._namespace = namespace
        self._pages = pages
        self._around = around
        self._by_epoch: dict[int, SimulatedStorage] = {}

    def of(self, epoch: int) -> SimulatedStorage:
        """The store of an epoch, whoever has it open."""
        store = self._by_epoch.get(epoch)
        if store is None:
            digest = dataclasses.replace(self._namespace, weights_epoch=epoch).digest
            codec = FrameCodec(digest, self._namespace.geometry.payload_bytes)
            store = SimulatedStorage(codec, self._pages * codec.frame_bytes, self, epoch, self._around)
            self._by_epoch[epoch] = store
        return store

    def open_now(self, epoch: int) -> StorageBackend:
        """The store of an epoch, which the caller closes."""
        store = self.of(epoch)
        store.users += 1
        return store

    def open(self, epoch: int) -> StorageBackend:
        """As `open_now`, on a worker. It takes a while, and may fail."""
        self._around.elsewhere()
        mishap = self._around.mishap()
        if mishap is not None:
            raise mishap
        if self._around.random.random() < self._around.fault_rate:
            raise BackendError("the simulated server refuses connections")
        return self.open_now(epoch)

    @property
    def users(self) -> int:
        """How many stores are open, counted once for each who has one open."""
        return sum(store.users for store in self._by_epoch.values())
