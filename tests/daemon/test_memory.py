"""The mappings of engines' memory: a name has one mapping, and slow removals do not block other calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from hicache.daemon.memory import _JOIN_S, Mapping, Memories
from hicache.daemon.protocol import AttachMemory, Refused
from hicache.shared_memory import SharedMemory, path_of
from hicache_lab.clocks import ManualClock
from tests.daemon.daemons import EngineMemory
from tests.waiting import WAIT_S


def soon() -> float:
    return time.monotonic() + WAIT_S


def request_of(memory: EngineMemory) -> AttachMemory:
    device, inode = memory.shared.identity
    return AttachMemory(frame_bytes=memory.frame_bytes, pages=memory.pages, device=device, inode=inode)


@pytest.fixture
def memories() -> Iterator[Memories]:
    made = Memories()
    yield made
    made.close(soon())


def test_an_attach_that_waited_uses_the_mapping_that_another_thread_made(
    memories: Memories, memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second mapping would replace the first one in the table, and a detach would not wait for its operations."""
    request = request_of(memory)
    known = memories.attach(memory.name, request, soon())
    known.is_leaving = True  # as during a detach that waits for operations
    take_out, made = Memories._take_out, list[Mapping]()

    def take_out_then_attach(self: Memories, mapping: Mapping, deadline: float, gone: list[Mapping]) -> None:
        take_out(self, mapping, deadline, gone)
        if not made:
            made.append(self.attach(memory.name, request, deadline))

    monkeypatch.setattr(Memories, "_take_out", take_out_then_attach)
    assert memories.attach(memory.name, request, soon()) is made[0]
    (client,) = memories.statistics()
    assert client.frame_bytes * client.pages == request.frame_bytes * request.pages
    with memories.frames(made[0], [0], request.frame_bytes), pytest.raises(Refused, match="operations on its frames"):
        memories.detach(memory.name, 0.0)


def test_memory_over_a_limit_is_rejected_until_other_memory_is_detached(memory: EngineMemory) -> None:
    size_bytes = memory.frame_bytes * memory.pages
    for memories, status in ((Memories(size_bytes + 1), 413), (Memories(count_max=1), 503)):
        other = EngineMemory(2)
        memories.attach(memory.name, request_of(memory), soon())
        with pytest.raises(Refused) as caught:
            memories.attach(other.name, request_of(other), soon())
        assert caught.value.status == status
        memories.detach(memory.name, soon())
        memories.attach(other.name, request_of(other), soon())
        memories.close(soon())
        other.close()


def test_memory_made_for_an_engine_is_removed_if_the_engine_does_not_open_it_in_time() -> None:
    clock, name = ManualClock(), f"hicache-test-late-{os.getpid()}"
    memories = Memories(clock=clock)
    memories.attach(name, AttachMemory(frame_bytes=4096, pages=2, shape=bytes(32).hex()), clock() + WAIT_S)
    assert memories.tend() == [] and path_of(name).exists()
    clock.advance(_JOIN_S)
    assert memories.tend() == [name] and not path_of(name).exists()


@pytest.mark.parametrize("way", ["detach", "tend"])
def test_unmapping_memory_does_not_block_other_calls(
    memories: Memories, memory: EngineMemory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Freeing the memory of a large engine takes the system seconds, and the event loop looks up mappings."""
    other = EngineMemory()
    found = memories.attach(other.name, request_of(other), soon())
    memories.attach(memory.name, request_of(memory), soon())
    unmap, began, ends = SharedMemory.close, threading.Event(), threading.Event()

    def slow(self: SharedMemory) -> None:
        began.set()
        assert ends.wait(WAIT_S)
        unmap(self)

    memory.close()
    monkeypatch.setattr(SharedMemory, "close", slow)
    removal = threading.Thread(target=memories.tend if way == "tend" else lambda: memories.detach(memory.name, soon()))
    removal.start()
    assert began.wait(WAIT_S)
    try:
        lookup = threading.Thread(target=memories.find, args=(other.name, found.id), daemon=True)
        lookup.start()
        lookup.join(WAIT_S)
        assert not lookup.is_alive()
    finally:
        ends.set()
        removal.join(WAIT_S)
        monkeypatch.undo()
        other.close()
