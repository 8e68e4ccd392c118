"""Page keys from the engine: their events, and the caches that reject them because they hash tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.cache import ChunkCache, HiRadixCache, SessionCache
from hicache.cache.recorder import EventRecorder
from hicache.errors import InvalidInput
from hicache.events import EventStream, Medium, PrefixIndex, Stored
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from hicache.radix import RadixTree, make_policy
from hicache.tiers import create_device_pool
from tests.backends._files import open_file

from .world import GEOMETRY, World, codec

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


CALLS: dict[str, Callable[[Any], object]] = {
    "begin_request": lambda cache: cache.begin_request("r", KEY),
    "match_prefix": lambda cache: cache.match_prefix(KEY),
    "peek": lambda cache: cache.peek(KEY),
    "prefetch": lambda cache: cache.prefetch_from_storage("r", KEY),
}


@pytest.mark.parametrize("sessions", [False, True], ids=["tree", "sessions"])
@pytest.mark.parametrize("call", CALLS)
def test_a_cache_that_hashes_tokens_rejects_given_keys_and_names_the_alternative(
    tmp_path: Path, call: str, sessions: bool
) -> None:
    kind = SessionCache if sessions else HiRadixCache
    engine = World(backend=open_file(tmp_path / "s", codec()).backend, kind=kind)
    cache = engine.cache
    with pytest.raises(InvalidInput, match="a cache of page keys"):
        CALLS[call](cache)
    cache.check()
    assert engine.cache.tree.node_count == 0
    engine.close()


def test_a_cache_without_a_tree_rejects_given_keys() -> None:
    with ChunkCache(create_device_pool(GEOMETRY, 4)) as cache:
        with pytest.raises(InvalidInput, match="a cache of page keys"):
            cache.begin_request("r", KEY)
        cache.check()
