"""A memory driver for tests of stores and compositions: it records its calls and fails on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hicache.backends.driver import Answer
from hicache.backends.errors import StoreError
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)


class Troubled(MemoryDriver):
    """A memory driver that records each call in `calls` (find, get, set, delete), with its keys and parent.

    `down` makes every function fail at once, `hanging` at its deadline. `fail_calls` makes that many next calls fail,
    `fail_pages` only these pages. `raises` is raised, and `answers` returned by lookups and removals instead of the
    correct result. Writes block until `gate` is set.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.calls: list[tuple[str, tuple[bytes, ...], bytes | None]] = []
        self.down = self.hanging = False
        self.fail_calls = 0
        self.fail_pages: set[bytes] = set()
        self.raises: Exception | None = None
        self.answers: Any = None
        self.gate = threading.Event()
        self.gate.set()
        self.released = threading.Event()
        self.at_gate = self.closes = 0
        self.held_at_close: set[bytes] = set()

    def _reach(self, verb: str, keys: Sequence[bytes], deadline: float, parent: bytes | None = None) -> None:
        self.calls.append((verb, tuple(keys), parent))
        if verb == "set":
            self.at_gate += 1
            self.gate.wait(30.0)
        if self.raises is not None:
            raise self.raises
        if self.hanging:
            self.released.wait(max(0.0, min(deadline - time.monotonic(), 30.0)))
        fails = self.down or self.hanging or self.fail_calls > 0
        self.fail_calls = max(0, self.fail_calls - 1)
        if fails:
            raise StoreError("down")

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterable[Answer]:  # type: ignore[override]
        self._reach("find", keys, deadline)
        return super().find(namespace, keys, deadline) if self.answers is None else self.answers

    def read(self, pages: PageReads[bytes]) -> None:
        self._reach("get", pages.keys, pages.deadline)
        super().read(pages)
        for position, key in enumerate(pages.keys):
            if key in self.fail_pages:
                pages.fail(position, "down")

    def write(self, pages: PageWrites) -> None:
        self._reach("set", pages.keys, pages.deadline, pages.parents[0])
        if not self.fail_pages:
            super().write(pages)
            return
        for position, key in enumerate(pages.keys):
            if key in self.fail_pages:
                pages.fail(position, "down")
            elif self.peek(pages.codec.namespace, key) is not None:
                pages.present(position)
            else:
                self.poke(pages.codec.namespace, key, b"".join(pages.sealed(position)))
                pages.stored(position)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        self._reach("delete", keys, deadline)
        return super().remove(namespace, keys, deadline, found) if self.answers is None else (self.answers, ())

    def close(self) -> None:
        self.closes += 1
        self.held_at_close |= {name[32:] for name in self._pages}
        super().close()

    def called(self, verb: str) -> list[tuple[bytes, ...]]:
        """Return the keys of each call of one function so far."""
        return [keys for name, keys, _ in self.calls if name == verb]

    def parents(self) -> list[bytes | None]:
        """Return the parent of each batch written."""
        return [parent for name, _, parent in self.calls if name == "set"]

    @property
    def count(self) -> int:
        """Return the number of stored pages."""
        return len(self._pages)
