"""The state machine detects faulty drivers. These are the controls of the contract's random walk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.backends.base import Usage
from hicache.backends.memory import MemoryDriver
from hicache.frame import FrameCodec
from hicache_lab.conformance import Subject, bare, memory_subject, run_machine

pytestmark = pytest.mark.long

Keys = Sequence[bytes]


class _Lookup(MemoryDriver):
    """Finds one page too many."""

    def find(self, namespace: bytes, keys: Keys, deadline: float) -> list[bool]:
        found = super().find(namespace, keys, deadline)
        if False in found:
            found[found.index(False)] = True
        return found


class _Trust(MemoryDriver):
    """Does not remove damaged pages."""

    def remove(
        self, namespace: bytes, keys: Keys, deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        return super().remove(namespace, keys, deadline) if found is None else (0, ())


class _Count(MemoryDriver):
    """Reports three pages at most as its usage."""

    def measure(self) -> Usage:
        found = super().measure()
        return Usage(min(found.pages, 3), found.bytes, found.capacity_bytes)


@pytest.mark.parametrize(
    ("wrong", "reopens"), [(_Lookup, False), (_Trust, False), (_Count, False), (MemoryDriver, True)]
)
def test_a_driver_with_a_fault_fails_the_walk(wrong: type[MemoryDriver], reopens: bool) -> None:
    """A driver that forgets its pages fails the walk that opens it again. The sound one passes the contract."""
    with pytest.raises(AssertionError):
        run_machine(lambda codec: _open(wrong, codec), examples=50, reopens=reopens, shortest=False)


def _open(kind: type[MemoryDriver], codec: FrameCodec) -> Subject:
    driver = kind()
    return memory_subject(bare(driver, codec), driver)
