"""The mappings of engines' memory: no two threads make two of one name, and none keeps the others waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hicache.daemon.memory import Mapping, Memories, MemoryRequest
from hicache.daemon.refusal import Refused
from hicache.shared_memory import SharedMemory
from tests.daemon.daemons import EngineMemory
from tests.waiting import WAIT_S


def soon() -> float:
    return time.monotonic() + WAIT_S


def request_of(memory: EngineMemory) -> MemoryRequest:
    return MemoryRequest(memory.name, memory.frame_bytes, memory.pages, memory.shared.identity)


@pytest.fixture
def memories() -> Iterator[Memories]:
    made = Memories(1 << 30, 8)
    yield made
    made.close(soon())


def test_an_attach_that_waited_takes_the_mapping_that_another_one_made_meanwhile(
    memories: Memories, memory: EngineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would replace it in the table: a detach would not wait for the operations of the one that is lost."""
    asked = request_of(memory)
    known = memories.attach(asked, soon())
    known.is_leaving = True  # a detach that has not ended its wait
    take_out, made = Memories._take_out, list[Mapping]()

    def meanwhile(self: Memories, mapping: Mapping, deadline: float, gone: list[Mapping]) -> None:
        take_out(self, mapping, deadline, gone)
        if not made:
            made.append(self.attach(asked, deadline))

    monkeypatch.setattr(Memories, "_take_out", meanwhile)
    assert memories.attach(asked, soon()) is made[0]
    assert memories._bytes == asked.frame_bytes * asked.pages
    with memories.frames(made[0], [0], asked.frame_bytes), pytest.raises(Refused, match="operations touch"):
        memories.detach(memory.name, 0.0)


@pytest.mark.parametrize("way", ["detach", "tend"])
def test_memory_that_is_being_unmapped_keeps_no_other_call_waiting(
    memories: Memories, memory: EngineMemory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The system takes seconds to free the memory of a large engine, and the event loop asks for mappings."""
    other = EngineMemory()
    found = memories.attach(request_of(other), soon())
    memories.attach(request_of(memory), soon())
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
        looked = threading.Thread(target=memories.find, args=(other.name, found.id), daemon=True)
        looked.start()
        looked.join(WAIT_S)
        assert not looked.is_alive()
    finally:
        ends.set()
        removal.join(WAIT_S)
        monkeypatch.undo()
        other.close()
