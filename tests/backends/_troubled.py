"""A memory store for tests of wrappers and guards: it records its calls and fails on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES
from hicache.frame import FrameCodec, PageBuffer

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)


class Troubled(MemoryBackend):
    """A memory store that records each call in `calls`, with its keys and parent.

    `down` makes every verb fail at once, `hanging` at its deadline. `fail_calls` makes that many next calls fail,
    `fail_pages` only these pages. `raises` is raised and `answers` returned instead of the correct result. Writes block
    until `gate` is set.
    """

    def __init__(self, codec: FrameCodec = CODEC, capacity_bytes: int | None = None) -> None:
        super().__init__(codec, capacity_bytes)
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

    def _fails(self, verb: str, keys: Sequence[bytes], deadline: float, parent: bytes | None = None) -> bool:
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
            self.count("down")
        return fails

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        if self._fails("exists", keys, deadline):
            return 0
        return super().batch_exists(keys, deadline=deadline) if self.answers is None else self.answers

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        if self._fails("has", keys, deadline):
            return [False] * len(keys)
        return super().batch_has(keys, deadline=deadline) if self.answers is None else self.answers

    def batch_get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float) -> list[GetOutcome]:
        if self._fails("get", keys, deadline):
            return [GetOutcome.ERROR] * len(keys)
        if self.answers is not None:
            return self.answers  # type: ignore[no-any-return]
        found = super().batch_get(keys, pages, deadline=deadline)
        return [GetOutcome.ERROR if key in self.fail_pages else one for key, one in zip(keys, found, strict=True)]

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        if self._fails("set", keys, deadline, parent):
            return [SetOutcome.ERROR] * len(keys)
        if not self.fail_pages:
            return super().batch_set(keys, pages, parent=parent, deadline=deadline)
        outcomes: list[SetOutcome] = []
        for key, page in zip(keys, pages, strict=True):
            if key in self.fail_pages:
                outcomes.append(SetOutcome.ERROR)
            else:
                outcomes += super().batch_set([key], [page], parent=parent, deadline=deadline)
            parent = key
        return outcomes

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        return 0 if self._fails("delete", keys, deadline) else super().delete(keys, deadline=deadline)

    def clear(self, *, deadline: float) -> int:
        if self._fails("clear", (), deadline):
            return 0
        return super().clear(deadline=deadline) if self.answers is None else self.answers

    def close(self) -> None:
        self.closes += 1
        self.held_at_close |= self._pages.keys()
        super().close()

    def called(self, verb: str) -> list[tuple[bytes, ...]]:
        """Return the keys of each call of one verb so far."""
        return [keys for name, keys, _ in self.calls if name == verb]

    def parents(self) -> list[bytes | None]:
        """Return the parent of each batch passed to `batch_set`."""
        return [parent for name, _, parent in self.calls if name == "set"]

    @property
    def pages(self) -> int:
        """Return the number of stored pages."""
        return len(self._pages)
