"""A store that is one disk: reads and writes take turns, and writes give way to reads."""

from __future__ import annotations

import pytest

from hicache.backends.store import UNGUARDED, Store
from hicache.config import HiCacheConfig, TransferConfig
from hicache.controller import HiCacheController, Read
from hicache.controller import Store as StoreOperation
from hicache.controller.storage import SharedTime
from hicache.geometry import KVGeometry
from hicache.keys import PageChain, RadixKey
from hicache.lab.replay.virtual.clock import VirtualClock
from hicache.lab.replay.virtual.machine import UntouchedHostPool, VirtualWorkers
from hicache.lab.replay.virtual.store import Table, TableDriver, UnverifiedCodec
from hicache.lab.speeds import StorageSpeed

PAGE_TOKENS, PAGES = 16, 4
GEOMETRY = KVGeometry(layers=1, heads=1, head_dim=8, page_size=PAGE_TOKENS, dtype="float32")


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


def ends(*, reads: bool) -> dict[str, float]:
    """Read one prompt and store another, a page at a time and in a second each, on a store that is one disk. Return
    when both had ended."""
    clock, codec = VirtualClock(), UnverifiedCodec(bytes(32), GEOMETRY.payload_bytes)
    speed = StorageSpeed(read_bytes_per_s=codec.frame_bytes, write_bytes_per_s=codec.frame_bytes, parallel=1, links=1)
    table = Table(clock, speed, codec.frame_bytes, None, sweeps=False)
    store = Store(TableDriver(table), codec, UNGUARDED, clock=clock, workers=VirtualWorkers)
    host = UntouchedHostPool(GEOMETRY, 2 * PAGES)
    config = HiCacheConfig(transfer=TransferConfig(storage_batch_pages=1, store_host_share=1.0))
    controller = HiCacheController(host, None, store, config, workers=VirtualWorkers, clock=clock)
    key, other = (RadixKey.of(range(first, first + PAGES * PAGE_TOKENS)) for first in (0, 1000))
    pages, others = host.alloc(PAGES), host.alloc(PAGES)
    assert pages is not None and others is not None
    for page in key.page_keys(PAGE_TOKENS, key.seed, 0, PAGES):
        table.add(page, None)
    operations = dict[str, Read | StoreOperation]()
    if reads:
        lookup = controller.submit_lookup(key, start_page=0, prior=key.seed, call_s=60.0)
        while not lookup.ended:
            clock.sleep(0.001)
            controller.poll()
        operations["read"] = controller.submit_read(lookup, pages)
    chain = PageChain(other.tokens, PAGE_TOKENS, other.seed)
    operations["store"] = controller.submit_store(chain, others, begins_prompt=True)
    began_s, ended = clock(), dict[str, float]()
    while len(ended) < len(operations):
        clock.sleep(0.25)
        controller.poll()
        for name, operation in operations.items():
            if operation.ended:
                ended.setdefault(name, clock() - began_s)
    return ended


def test_writes_give_way_to_reads_and_still_get_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alone_s, ours = ends(reads=False)["store"], ends(reads=True)
    monkeypatch.setattr(SharedTime, "give_way", lambda self, until_s: None)
    control = ends(reads=True)
    assert alone_s == pytest.approx(PAGES, abs=0.5)
    assert ours["read"] <= control["read"] - 1
    assert ours["store"] <= control["store"] + 1
