"""What the tests of compositions share: memory parts with a switch for trouble, and a side door to all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend
from hicache.backends.compose import ComposedBackend, LevelsBackend, Part
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES, Store
from hicache.errors import BackendError
from hicache.frame import FrameCodec, PageBuffer
from tests.waiting import wait_for

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes
COPIES = 64 * PAGE


class Switched(MemoryBackend):
    """A memory backend that fails, hangs until its deadline, or waits for a gate, as told; and that counts its calls.

    `down` makes every verb fail at once, `hanging` at its deadline. `gate` holds writes back while it is not set.
    """

    def __init__(self, codec: FrameCodec = CODEC, capacity_bytes: int | None = None) -> None:
        super().__init__(codec, capacity_bytes)
        self.down = False
        self.hanging = False
        self.refuses_to_close = False
        self.gate = threading.Event()
        self.gate.set()
        self.released = threading.Event()
        self.at_gate = 0
        self.closes = 0
        self.held_at_close: set[bytes] = set()
        self.calls: list[tuple[str, tuple[bytes, ...], bytes | None]] = []

    def _trouble(self, deadline: float) -> bool:
        if self.hanging:
            self.released.wait(max(0.0, min(deadline - time.monotonic(), 30.0)))
        return self.down or self.hanging

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        self.calls.append(("exists", tuple(keys), None))
        return 0 if self._trouble(deadline) else super().batch_exists(keys, deadline=deadline)

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        self.calls.append(("get", tuple(keys), None))
        if self._trouble(deadline):
            return [GetOutcome.ERROR] * len(keys)
        return super().batch_get(keys, pages, deadline=deadline)

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        self.calls.append(("set", tuple(keys), parent))
        self.at_gate += 1
        self.gate.wait(30.0)
        if self._trouble(deadline):
            return [SetOutcome.ERROR] * len(keys)
        return super().batch_set(keys, pages, parent=parent, deadline=deadline)

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        self.calls.append(("has", tuple(keys), None))
        return [False] * len(keys) if self._trouble(deadline) else super().batch_has(keys, deadline=deadline)

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        return 0 if self._trouble(deadline) else super().delete(keys, deadline=deadline)

    def clear(self, *, deadline: float) -> int:
        return 0 if self._trouble(deadline) else super().clear(deadline=deadline)

    def close(self) -> None:
        self.closes += 1
        self.held_at_close |= self._pages.keys()
        super().close()
        if self.refuses_to_close:
            raise BackendError("this part does not close")

    def called(self, verb: str) -> list[tuple[bytes, ...]]:
        """The keys of each call of one verb so far."""
        return [keys for name, keys, _ in self.calls if name == verb]


def named(*backends: StorageBackend) -> list[Part]:
    """Parts called `part-0`, `part-1`, ..."""
    return [Part(f"part-{number}", backend) for number, backend in enumerate(backends)]


def settle(composed: LevelsBackend) -> None:
    """Until nothing waits to be copied."""
    wait_for(lambda: not any(copies.waiting for copies in composed.copies().values()))
    composed.check()


def side_door(composed: ComposedBackend, stores: Sequence[Store]) -> Store:
    """What is stored is what the first part has that has something; what is written is written to all that have it.

    Pages on their way in the background arrive first, or a copy would come after the damage.
    """

    def read(key: bytes) -> bytes | None:
        return next((raw for store in stores if (raw := store.read(key)) is not None), None)

    def write(key: bytes, data: bytes) -> None:
        if isinstance(composed, LevelsBackend):
            settle(composed)
        for store in stores:
            if store.read(key) is not None:
                store.write(key, data)

    return Store(composed, read, write)
