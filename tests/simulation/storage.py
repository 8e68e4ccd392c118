"""Storage with faults: slow, full, with lost and damaged pages and a stale index, and shared with other engines."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import Storage
from hicache.errors import BackendError
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.keys import Namespace
from hicache_lab.conformance import bare
from tests.passing import Passing
from tests.simulation.memory import JUNK, Finding
from tests.stamps import Stamps


class Surroundings(Protocol):
    """The part of a simulation that storage needs. `fault_rate` is per call or page."""

    random: random.Random
    stamps: Stamps
    fault_rate: float
    epoch: int  # of the weights in use

    def clock(self) -> float:
        """Return simulated seconds."""

    def elsewhere(self) -> None:
        """Run some steps of the scheduler, the device and other workers."""

    def mishap(self) -> BaseException | None:
        """Return an exception that a worker raises now; usually None."""


class SimulatedStorage(Passing):
    """A memory store with faults, and pauses before and after every page. `close` keeps its pages.

    It follows the contract: an outcome other than HIT leaves junk in the frame, which the caller must not use. It
    compares every stored frame with the bytes of its page under the weights of `epoch`, and reports calls while it is
    closed.
    """

    def __init__(
        self, codec: FrameCodec, capacity_bytes: int, server: Stores, epoch: int, around: Surroundings
    ) -> None:
        self._driver = MemoryDriver(capacity_bytes)
        super().__init__(bare(self._driver, codec))
        self.epoch = epoch
        self.users = 0
        self.known: set[bytes] = set()  # keys of all pages that have ever been stored
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
            raise Finding("counters", f"the store of epoch {self.epoch} is used or closed again after it was closed")

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        self._require_open()
        self._pause()
        self._maybe_raise()
        if self._fault() or self._sim_clock() >= call.deadline:
            return 0
        if self._fault():
            return self.random.randint(0, len(keys))  # a stale index
        return self.inner.batch_exists(keys, deadline=math.inf)

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[Any]) -> list[GetOutcome]:
        self._require_open()
        self._maybe_raise()
        outcomes = []
        for key, frame in zip(keys, pages, strict=True):
            frame[: HEADER_BYTES + self.codec.payload_bytes] = bytes([JUNK]) * (HEADER_BYTES + self.codec.payload_bytes)
            self._pause()
            outcome = GetOutcome.ERROR
            if self._fault():
                outcome = self.random.choice([GetOutcome.ERROR, GetOutcome.MISS, GetOutcome.CORRUPT])
            elif self._sim_clock() < call.deadline:
                outcome = self.inner.batch_get([key], [frame], deadline=math.inf)[0]
            if outcome is not GetOutcome.HIT:
                frame[HEADER_BYTES : HEADER_BYTES + 16] = bytes([JUNK]) * 16
            outcomes.append(outcome)
            self._pause()
        self._maybe_raise()
        return outcomes

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[Any], parent: bytes | None
    ) -> list[SetOutcome]:
        self._require_open()
        if self.epoch != self._around.epoch:
            raise Finding("stale store", f"a write to the store of epoch {self.epoch} began under {self._around.epoch}")
        if not self._server.attached:
            raise Finding("stale store", "a write to a detached server began")
        self._maybe_raise()
        outcomes: list[SetOutcome] = []
        for key, frame in zip(keys, pages, strict=True):
            self._pause()
            if self._fault() or self._sim_clock() >= call.deadline:
                outcomes.append(self.random.choice([SetOutcome.ERROR, SetOutcome.REJECTED]))
            else:
                self._require_correct(key, frame)
                outcomes += self.inner.batch_set([key], [frame], parent=parent, deadline=math.inf)
                self.known.add(key)
            parent = key
            self._pause()
        return outcomes

    def store_as_another_engine(self, keys: Sequence[bytes]) -> None:
        """Store the pages of a chain, head first, like another engine of the namespace."""
        parent: bytes | None = None
        for key in keys:
            frame = bytearray(self.codec.frame_bytes)
            frame[HEADER_BYTES : HEADER_BYTES + self.codec.payload_bytes] = self._stamps.payload(key, self.epoch)
            self.inner.batch_set([key], [memoryview(frame)], parent=parent, deadline=math.inf)
            self.known.add(key)
            parent = key

    def lose_or_damage_page(self) -> None:
        """Remove or damage one stored page."""
        keys = [page.key for page in self._driver.pages("", math.inf)]
        if not keys:
            return
        key = self.random.choice(keys)
        if self.random.random() < 0.5:
            self.delete([key], deadline=math.inf)
            return
        frame = bytearray(self._driver.peek(self.codec.namespace, key) or b"")
        frame[self.random.randrange(HEADER_BYTES + self.codec.payload_bytes)] ^= 1 << self.random.randrange(8)
        self._driver.poke(self.codec.namespace, key, bytes(frame))

    def _require_correct(self, key: bytes, frame: memoryview) -> None:
        if frame[HEADER_BYTES : HEADER_BYTES + self.codec.payload_bytes] != self._stamps.payload(key, self.epoch):
            raise Finding("wrong bytes", "a stored page differs from the page of its key")

    def _fault(self) -> bool:
        return self._around.fault_rate > 0 and self.random.random() < self._around.fault_rate

    def _maybe_raise(self) -> None:
        if self._fault() and self.random.random() < 0.2:
            raise ConnectionError("the simulated store is down")


class Stores:
    """The stores of one server, one per epoch, of `pages` pages each. `attached` is True while the cache uses them."""

    def __init__(self, namespace: Namespace, pages: int, around: Surroundings) -> None:
        self.attached = False
        self._namespace = namespace
        self._pages = pages
        self._around = around
        self._by_epoch: dict[int, SimulatedStorage] = {}

    def of(self, epoch: int) -> SimulatedStorage:
        """Return the store of an epoch, open or not."""
        store = self._by_epoch.get(epoch)
        if store is None:
            digest = dataclasses.replace(self._namespace, weights_epoch=epoch).digest
            codec = FrameCodec(digest, self._namespace.shape.payload_bytes)
            store = SimulatedStorage(codec, self._pages * codec.frame_bytes, self, epoch, self._around)
            self._by_epoch[epoch] = store
        return store

    def open_now(self, epoch: int) -> Storage:
        """Open the store of an epoch. The caller closes it."""
        store = self.of(epoch)
        store.users += 1
        return store

    def open(self, epoch: int) -> Storage:
        """As `open_now`, on a worker. Other actions run during the call, and it may fail."""
        self._around.elsewhere()
        mishap = self._around.mishap()
        if mishap is not None:
            raise mishap
        if self._around.random.random() < self._around.fault_rate:
            raise BackendError("the simulated server refuses connections")
        return self.open_now(epoch)

    @property
    def users(self) -> int:
        """The number of openings that have not been closed."""
        return sum(store.users for store in self._by_epoch.values())
