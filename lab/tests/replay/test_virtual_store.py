"""Stores in virtual time: their tables keep exactly the pages that the real stores keep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest

from hicache import tournament
from hicache.backends.file import FileDriver, driver
from hicache.backends.memory import MemoryDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, make_keys
from hicache_lab.replay.virtual.clock import VirtualClock
from hicache_lab.replay.virtual.machine import VirtualWorkers
from hicache_lab.replay.virtual.store import FileTable, Table, TableDriver, UnverifiedCodec
from hicache_lab.speeds import StorageSpeed
from tests.seeds import rng, seeds

CHAINS, LENGTH, PAGES_MAX, STEPS = 12, 10, 40, 400
INSTANT = StorageSpeed(read_bytes_per_s=1e18, write_bytes_per_s=1e18)
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)


def pair(kind: str, directory: Path, clock: VirtualClock, policy: Literal["lru", "adaptive"]) -> tuple[Store, Store]:
    """Return a real store and one over a table, both of `PAGES_MAX` pages."""
    capacity = PAGES_MAX * CODEC.frame_bytes
    real: FileDriver | MemoryDriver
    table: Table
    if kind == "file":
        options = FileStorageOptions(
            path=directory / "pages", capacity=capacity, free_space_floor=0, eviction_policy=policy
        )
        real = FileDriver(CODEC, options, clock=clock)
        table = FileTable(clock, INSTANT, CODEC.frame_bytes, capacity, adaptive=policy == "adaptive")
        for adaptive in (real._adaptive, table._adaptive):
            if adaptive is not None:
                adaptive._tournament._best = 1
    else:
        real = MemoryDriver(capacity)
        table = Table(clock, INSTANT, CODEC.frame_bytes, capacity, sweeps=False)
    codec = UnverifiedCodec(NAMESPACE, PAYLOAD_BYTES)
    return (
        Store(real, CODEC, UNGUARDED, clock=clock, workers=VirtualWorkers),
        Store(TableDriver(table), codec, UNGUARDED, clock=clock, workers=VirtualWorkers),
    )


@pytest.mark.parametrize(("kind", "policy"), [("memory", "lru"), ("file", "lru"), ("file", "adaptive")])
@pytest.mark.parametrize("seed", seeds(3))
def test_a_table_evicts_the_pages_that_the_real_store_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, policy: Literal["lru", "adaptive"], seed: int
) -> None:
    # Otherwise the file store counts uses up to a second later.
    monkeypatch.setattr(driver, "USES_FLUSH_S", 0.0)
    # An adaptive store does not return to LRU.
    monkeypatch.setattr(tournament, "_RETURN", math.inf)
    numbers, clock = rng(seed), VirtualClock()
    stores = pair(kind, tmp_path, clock, policy)
    # Half of the chains share their first pages with the one before.
    chains = [make_keys(LENGTH, f"chain {number}") for number in range(CHAINS)]
    for number in range(1, CHAINS, 2):
        chains[number][:4] = chains[number - 1][:4]
    keys = sorted({key for chain in chains for key in chain})
    frames = [memoryview(bytearray(CODEC.frame_bytes)) for _ in range(LENGTH)]
    evictions = 0
    for step in range(STEPS):
        clock.sleep(numbers.uniform(0.1, 5.0))
        chain = numbers.choice(chains)
        end = numbers.randint(1, LENGTH)
        start = numbers.randint(0, end - 1)
        kept = []
        for store in stores:
            deadline = clock() + 60
            if step % 3 == 0:
                store.batch_set(chain[start:end], frames[start:end], parent=chain[start - 1] if start else None,
                                deadline=deadline)
            elif step % 3 == 1:
                store.batch_get(chain[:end], frames[:end], deadline=deadline)
            else:
                store.batch_touch(chain[:end], deadline=deadline)
            kept.append(store.batch_has(keys, deadline=deadline))
        assert kept[0] == kept[1], f"step {step}"
        evictions = stores[1].statistics().evicted_pages
    assert evictions > 50, "the store was hardly ever full"
    assert stores[0].statistics().evicted_pages == evictions
    for store in stores:
        store.close()
