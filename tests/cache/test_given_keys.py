"""Page keys from the engine: their events, and the caches that reject them because they hash tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from hicache.cache import ChunkCache
from hicache.cache.recorder import AWAITED_MAX, EventRecorder
from hicache.errors import InvalidInput
from hicache.events import Event, EventReader, EventStream, Medium, PageBlocks, PrefixIndex, Stored
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from hicache.radix import RadixTree, make_policy
from hicache.tiers import create_device_pool

from .host_world import HostWorld
from .world import GEOMETRY, prompt

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
KEY = RadixKey.of_hashes(HASHES)


def test_events_of_given_keys_contain_the_keys_and_no_tokens() -> None:
    stream = EventStream(1 << 20)
    tree = RadixTree(4, make_policy("lru"), position_bytes=PAGE_KEY_BYTES, observer=EventRecorder(stream))
    tree.insert(KEY.head(2), np.arange(1, 3, dtype=np.int32))
    tree.insert(KEY, np.arange(3, 9, dtype=np.int32))
    reader, index = stream.subscribe(), PrefixIndex()
    events = reader.drain(100)
    assert [event[1:6] for event in events if isinstance(event, Stored)] == [
        (tuple(HASHES[:2]), None, b"", b"", 4), (tuple(HASHES[2:]), HASHES[1], b"", b"", 4),
    ]
    index.apply(events)
    index.check()
    assert index.prefix_pages([*HASHES, b"x" * 32], Medium.DEVICE) == 6
    assert decode_batch(encode_batch(events, 1.5)) == events


def described(number: int) -> PageBlocks:
    """Return two blocks with made-up hashes; the second is the page key."""
    return PageBlocks(bytes([number]) * 32 + HASHES[number], None, bytes(16), (None, None))


def recorded() -> tuple[EventRecorder, RadixTree, EventReader]:
    recorder = EventRecorder(EventStream(1 << 20), slice_s=60.0)
    tree = RadixTree(4, make_policy("lru"), position_bytes=PAGE_KEY_BYTES, observer=recorder)
    return recorder, tree, recorder.stream.subscribe()


def blocks_of(events: Sequence[Event]) -> list[tuple[PageBlocks | None, ...]]:
    return [event.blocks for event in events if isinstance(event, Stored)]


def test_events_have_the_blocks_of_described_pages() -> None:
    recorder, tree, reader = recorded()
    recorder.describe_blocks(KEY.head(3), 1, described)
    tree.insert(KEY.head(3), np.arange(1, 4, dtype=np.int32))
    expected = (None, described(1), described(2))
    assert blocks_of(reader.drain(10)) == [expected]
    tree.insert(RadixKey.of_hashes([*HASHES[:2], bytes(32)]), np.arange(4, 7, dtype=np.int32))  # splits the run
    reader.request_snapshot()
    recorder.poll(tree)
    assert blocks_of(reader.drain(10)[-3:]) in ([(None, described(1)), (described(2),), ()],
                                                [(None, described(1)), (), (described(2),)])


def test_a_page_that_leaves_the_tree_has_its_blocks_when_it_is_read_again() -> None:
    """A request describes its pages when it arrives, and may read them from storage much later."""
    recorder, tree, reader = recorded()
    recorder.describe_blocks(KEY.head(2), 0, described)
    for _ in range(2):
        tree.insert(KEY.head(2), np.arange(1, 3, dtype=np.int32))
        tree.evict_device(2)
    assert blocks_of(reader.drain(10)) == [(described(0), described(1))] * 2


def test_a_page_is_described_once_and_the_oldest_descriptions_are_forgotten() -> None:
    recorder, tree, reader = recorded()
    asked: list[int] = []

    def blocks(number: int) -> PageBlocks:
        asked.append(number)
        return described(number)

    recorder.describe_blocks(KEY.head(2), 0, blocks)
    recorder.describe_blocks(KEY.head(3), 0, blocks)
    assert asked == [0, 1, 2]
    many = RadixKey.of_hashes([number.to_bytes(32, "big") for number in range(AWAITED_MAX - 1)])
    recorder.describe_blocks(many, 0, lambda _: described(0))
    tree.insert(KEY.head(3), np.arange(1, 4, dtype=np.int32))
    assert blocks_of(reader.drain(10)) == [(None, None, described(2))]


def test_tokens_are_not_described() -> None:
    world = HostWorld()
    with pytest.raises(InvalidInput, match="describe page keys"):
        world.cache.describe_blocks(prompt(1), 0, described)
    world.close()


def test_a_cache_without_a_tree_rejects_given_keys() -> None:
    with ChunkCache(create_device_pool(GEOMETRY, 4)) as cache:
        with pytest.raises(InvalidInput, match="a cache of page keys"):
            cache.begin_request("r", KEY)
        cache.check()
