"""The state machine detects faulty backends. These are the controls of the contract's random walk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, Usage
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import Store, run_machine
from hicache.frame import FrameCodec, PageBuffer

pytestmark = pytest.mark.long

Keys = Sequence[bytes]
Frames = Sequence[PageBuffer]


class _Lookup(MemoryBackend):
    """Reports one page too many."""

    def batch_exists(self, keys: Keys, *, deadline: float) -> int:
        return min(len(keys), super().batch_exists(keys, deadline=deadline) + 1)


class _Trust(MemoryBackend):
    """Does not remove damaged pages."""

    def batch_get(self, keys: Keys, frames: Frames, *, deadline: float) -> list[GetOutcome]:
        raw = [self.peek(key) for key in keys]
        outcomes = super().batch_get(keys, frames, deadline=deadline)
        for key, data in zip(keys, raw, strict=True):
            if data is not None and self.peek(key) is None:
                self.poke(key, data)
        return outcomes


class _Overwrite(MemoryBackend):
    """Stores pages that are already stored."""

    def batch_set(
        self, keys: Keys, frames: Frames, *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        super().delete(keys[1:], deadline=deadline)
        return super().batch_set(keys, frames, parent=parent, deadline=deadline)


class _Delete(MemoryBackend):
    """Does not delete the last page of a batch."""

    def delete(self, keys: Keys, *, deadline: float) -> int:
        return super().delete(keys[:-1], deadline=deadline)


class _Count(MemoryBackend):
    """Reports three pages at most as its usage."""

    def usage(self) -> Usage:
        found = super().usage()
        return Usage(min(found.pages, 3), found.bytes, found.capacity_bytes)


@pytest.mark.parametrize("wrong", [_Lookup, _Trust, _Overwrite, _Delete, _Count])
def test_a_backend_with_a_fault_fails_the_walk(wrong: type[MemoryBackend]) -> None:
    with pytest.raises(AssertionError):
        run_machine(lambda codec: _open(wrong, codec), examples=50, reopens=False)


def test_a_backend_that_forgets_fails_the_walk_that_reopens() -> None:
    with pytest.raises(AssertionError):
        run_machine(lambda codec: _open(MemoryBackend, codec), examples=50, reopens=True)


def test_a_sound_backend_passes() -> None:
    run_machine(lambda codec: _open(MemoryBackend, codec), examples=50, reopens=False)


def _open(kind: type[MemoryBackend], codec: FrameCodec) -> Store:
    backend = kind(codec)
    return Store(backend, backend.peek, backend.poke)
