"""Page keys from the engine: their events, and the caches that reject them because they hash tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hicache.cache import ChunkCache
from hicache.cache.recorder import EventRecorder
from hicache.errors import InvalidInput
from hicache.events import EventStream, Medium, PrefixIndex, Stored
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from hicache.radix import RadixTree, make_policy
from hicache.tiers import create_device_pool

from .world import GEOMETRY

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
KEY = RadixKey.of_hashes(HASHES)


def test_events_of_given_keys_contain_the_keys_and_no_tokens() -> None:
    stream = EventStream(1 << 20)
    tree = RadixTree(4, make_policy("lru"), position_bytes=PAGE_KEY_BYTES, observer=EventRecorder(stream))
    tree.insert(KEY.head(2), np.arange(1, 3, dtype=np.int32))
    tree.insert(KEY, np.arange(3, 9, dtype=np.int32))
    reader, index = stream.subscribe(), PrefixIndex()
    events = reader.drain(100)
    assert [event[1:-1] for event in events if isinstance(event, Stored)] == [
        (tuple(HASHES[:2]), None, b"", b"", 4), (tuple(HASHES[2:]), HASHES[1], b"", b"", 4),
    ]  # fmt: skip
    index.apply(events)
    index.check()
    assert index.prefix_pages([*HASHES, b"x" * 32], Medium.DEVICE) == 6
    assert decode_batch(encode_batch(events, 1.5)) == events


def test_a_cache_without_a_tree_rejects_given_keys() -> None:
    with ChunkCache(create_device_pool(GEOMETRY, 4)) as cache:
        with pytest.raises(InvalidInput, match="a cache of page keys"):
            cache.begin_request("r", KEY)
        cache.check()
