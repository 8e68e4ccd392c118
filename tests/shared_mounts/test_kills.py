"""Two nodes share a directory, and one of them is killed (SIGKILL) again and again: `make shared`.

    SHARED_KILLS      how many kills (300)
    SHARED_KIND       the kind of mounts (bindfs; see `mounts`)
    TEST_SEED         the seed of the moments, victims and nodes; printed

After each kill every page that can be read through either mount has the bytes of its key, or is missing, and the other
node has not found a damaged page nor had an error.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_lab.clocks import ManualClock
from tests.backends._shared import open_shared
from tests.seeds import fuzz_seed
from tests.waiting import wait_for

from .mounts import SharedMounts, shared_mounts, unavailable
from .node import chain, make_codec, open_store, read_pages
from .nodes import Child, Nodes, jobs_of, stored_bytes, temporary_files

KILLS = int(os.environ.get("SHARED_KILLS", "300"))
KIND = os.environ.get("SHARED_KIND", "bindfs")
# A node lives so long after it has opened its store.
LIFE_S = (0.0, 0.5)
CHAINS = 24
HOURS_S = 7200.0
_REASON = unavailable(KIND)
pytestmark = [
    pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(60 + 10 * KILLS),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
]


class Killing:
    """Two nodes at work, and two readers, one on each mount."""

    def __init__(self, mounts: SharedMounts, nodes: Nodes, dice: random.Random, backend: str = "shared_files") -> None:
        self._nodes = nodes
        self._dice = dice
        self.jobs = jobs_of(mounts, backend=backend, chains=CHAINS, is_hasty=True)
        self.children = [self._start(side) for side in (0, 1)]
        codec = make_codec(self.jobs[0].page_bytes)
        self.readers = [open_shared(Path(job.path), codec).backend for job in self.jobs]
        self.found: Counter[str] = Counter()
        self.troubles: list[object] = []

    def _start(self, side: int) -> Child:
        return self._nodes.start(replace(self.jobs[side], seed=self._dice.randrange(1 << 30)))

    def kill_one(self) -> None:
        """Kill a node at a random moment; look at every page; start the node again."""
        side = self._dice.randrange(2)
        victim = self.children[side]
        wait_for(lambda: victim.is_open)
        time.sleep(self._dice.uniform(*LIFE_S))
        victim.kill()
        self.look()
        for child in self.children:
            self.troubles += child.troubles()
        self.children[side] = self._start(side)

    def look(self) -> None:
        """Read all pages through both mounts."""
        keys = [key for number in range(CHAINS) for key in chain(f"{number}")]
        for reader in self.readers:
            self.found += read_pages(reader, keys)

    def end(self) -> None:
        """End nodes and readers."""
        for child in self.children:
            wait_for(lambda child=child: child.is_open)  # type: ignore[misc]
            child.end()
            self.troubles += child.troubles()
        self.look()
        for reader in self.readers:
            reader.close()


def test_kills_leave_whole_pages_or_misses_and_their_files_are_removed(tmp_path: Path) -> None:
    seed = fuzz_seed()
    with shared_mounts(KIND) as mounts, Nodes(tmp_path) as nodes:
        killing, stored = Killing(mounts, nodes, random.Random(seed)), mounts.directory / "store"
        peak = 0
        for _ in range(KILLS):
            killing.kill_one()
            peak = max(peak, stored_bytes(stored))
            assert killing.troubles == [] and set(+killing.found) <= {"hit", "miss"}, (killing.found, killing.troubles)
        killing.end()
        assert killing.troubles == [] and set(+killing.found) <= {"hit", "miss"}, (killing.found, killing.troubles)
        left = temporary_files(stored)
        print(f"{KIND}, seed {seed}: {KILLS} kills, {dict(killing.found)} reads, at most {peak} bytes, "
              f"{len(left)} temporary files")
        assert killing.found["hit"] > 0
        assert left or KILLS < 100, "the control: the kills have interrupted writes"
        later = ManualClock()
        later.advance(HOURS_S)
        store = open_store(killing.jobs[0], later)
        wait_for(lambda: temporary_files(stored) == [])
        store.close()


def test_without_a_rename_kills_leave_damaged_pages(tmp_path: Path) -> None:
    """The control."""
    with shared_mounts(KIND) as mounts, Nodes(tmp_path) as nodes:
        killing = Killing(mounts, nodes, random.Random(1), backend="tests.shared_mounts.node:InPlace")
        for _ in range(60):
            killing.kill_one()
            if killing.found["corrupt"]:
                break
        killing.end()
    assert killing.found["corrupt"] or killing.troubles
