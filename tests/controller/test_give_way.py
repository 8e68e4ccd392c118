"""A store that is one disk: reads and writes take turns, and writes give way to reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache.controller import ReadOperation
from hicache.controller.storage import SharedTime
from hicache_lab.replay.virtual.clock import VirtualClock
from hicache_lab.replay.virtual.store import Table
from hicache_lab.speeds import StorageSpeed


@pytest.mark.parametrize(("links", "write_s"), [(2, 2.0), (1, 3.0)])
def test_one_link_serves_reads_and_writes_one_after_the_other(links: int, write_s: float) -> None:
    clock = VirtualClock()
    began_s, ended = clock(), dict[bool, float]()
    table = Table(clock, StorageSpeed(read_bytes_per_s=10, write_bytes_per_s=5, links=links), 10, None, sweeps=False)

    def move(writes: bool) -> None:
        table.move(1, writes=writes)
        ended[writes] = clock() - began_s

    clock.start(lambda: move(False))
    clock.start(lambda: move(True))
    clock.sleep(10)
    assert ended == pytest.approx({False: 1.0, True: write_s})


class Busy:
    """Reads of ten pages that follow each other, and a writer that writes whenever it may, for so many links."""

    def __init__(self, links: int, seconds: float) -> None:
        self.clock = VirtualClock()
        speed = StorageSpeed(read_bytes_per_s=10, write_bytes_per_s=10, parallel=1, links=links)
        self._table = Table(self.clock, speed, 1, None, sweeps=False)
        self._time = SharedTime(self.clock, 60.0)
        self._until_s = self.clock() + seconds
        self.reads = self.writes = 0
        self.clock.start(self._read_on)
        self.clock.start(self._write_on)
        self.clock.sleep(seconds + 10)

    def _read_on(self) -> None:
        nothing: Any = None
        while self.clock() < self._until_s:
            read = ReadOperation(
                [b""] * 10, np.zeros(10, np.int32), storage=nothing, deadline=0.0, called_s=self.clock()
            )
            self._time.begin(read)
            for _ in range(10):
                self._table.move(1, writes=False)
            self._time.end(read, self.clock(), 10)
            self.reads += 1
            self.clock.sleep(0.5)

    def _write_on(self) -> None:
        self.clock.sleep(20.0)  # first the reads are alone
        while self.clock() < self._until_s:
            with self._time.write(self._until_s):
                for _ in range(10):
                    self._table.move(1, writes=True)
            self.writes += 1


def test_writes_to_one_disk_give_way_to_reads_and_go_on_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Busy(1, 200)
    monkeypatch.setattr(SharedTime, "_is_one_disk", lambda self: False)
    control = Busy(1, 200)
    assert ours.reads > 1.1 * control.reads
    assert ours.writes > 0.4 * control.writes


def test_writes_do_not_wait_where_they_take_nothing_from_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Busy(2, 200)
    monkeypatch.setattr(SharedTime, "_is_one_disk", lambda self: False)
    control = Busy(2, 200)
    assert (ours.reads, ours.writes) == (control.reads, control.writes)
