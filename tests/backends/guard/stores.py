"""Stores that misbehave, and guards over them whose probes do not come by themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.guard import Direction, GuardedBackend, Refusal
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES
from hicache.config.guard import GuardConfig
from hicache.frame import FrameCodec, PageBuffer
from tests.waiting import wait_for

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
# A breaker that stays open for as long as a test takes: nobody probes meanwhile.
LONG_S = 1000.0


class Store(MemoryBackend):
    """A memory backend that counts the calls it gets and does what its fields say."""

    def __init__(self, codec: FrameCodec = CODEC) -> None:
        super().__init__(codec)
        self.calls: list[tuple[str, int]] = []
        self.parents: list[bytes | None] = []
        self.fail_pages: set[bytes] = set()  # keys that fail
        self.fail_calls = 0  # so many of the next calls fail
        self.down = False
        self.raises: Exception | None = None
        self.answers: Any = None

    def _trouble(self, verb: str, pages: int) -> bool:
        self.calls.append((verb, pages))
        if self.raises is not None:
            raise self.raises
        fails = self.down or self.fail_calls > 0
        self.fail_calls = max(0, self.fail_calls - 1)
        if fails:
            self.count("down")
        return fails

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        if self._trouble("exists", len(keys)):
            return 0
        return super().batch_exists(keys, deadline=deadline) if self.answers is None else self.answers

    def batch_get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float) -> list[GetOutcome]:
        if self._trouble("get", len(keys)):
            return [GetOutcome.ERROR] * len(keys)
        if self.answers is not None:
            return self.answers  # type: ignore[no-any-return]
        found = super().batch_get(keys, pages, deadline=deadline)
        return [GetOutcome.ERROR if key in self.fail_pages else one for key, one in zip(keys, found, strict=True)]

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        self.parents.append(parent)
        if self._trouble("set", len(keys)):
            return [SetOutcome.ERROR] * len(keys)
        outcomes: list[SetOutcome] = []
        for key, frame in zip(keys, pages, strict=True):
            if key in self.fail_pages:
                outcomes.append(SetOutcome.ERROR)
            else:
                outcomes += super().batch_set([key], [frame], parent=parent, deadline=deadline)
            parent = key
        return outcomes

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        if self._trouble("has", len(keys)):
            return [False] * len(keys)
        return super().batch_has(keys, deadline=deadline) if self.answers is None else self.answers

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        return 0 if self._trouble("delete", len(keys)) else super().delete(keys, deadline=deadline)

    def clear(self, *, deadline: float) -> int:
        if self._trouble("clear", 0):
            return 0
        return super().clear(deadline=deadline) if self.answers is None else self.answers

    @property
    def pages(self) -> int:
        """How many are stored."""
        return len(self._pages)


def patient(**options: Any) -> GuardConfig:
    """Options of a guard that opens at the third failure and is not probed after that; without retries."""
    return GuardConfig(**{"backoff_min": LONG_S, "backoff_max": LONG_S, "retry_share": 0.0, **options})


def quick(**options: Any) -> GuardConfig:
    """Options of a guard that heals fast; without retries."""
    return GuardConfig(**{"backoff_min": 0.02, "backoff_max": 0.05, "retry_share": 0.0, **options})


def refused(guard: GuardedBackend, direction: Direction, why: Refusal) -> int:
    """How many calls were refused for a reason."""
    return guard.guard_statistics().refused.get((direction, why), 0)


def until_passing(guard: GuardedBackend, direction: Direction, passes: bool = True) -> None:
    """Wait until calls of a direction are let through, or not any more."""
    wait_for(lambda: guard.may_pass(direction) is passes)


def past() -> float:
    """A deadline that is over."""
    return time.monotonic() - 1.0
