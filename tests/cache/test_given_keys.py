"""Page keys that the engine gives, on their way through events and storage; caches that need tokens refuse them."""

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
from tests.backends._files import open_file, page_files

from .world import GEOMETRY, World, codec

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
KEY = RadixKey.of_hashes(HASHES)


def world(root: Path) -> World:
    """A cache whose tree has given keys, over a file store. An engine cannot begin requests with them here."""
    return World(position_bytes=PAGE_KEY_BYTES, backend=open_file(root, codec()).backend)


def compute(engine: World, key: RadixKey) -> None:
    """Write the KV of all pages of `key` and hand them to the tree, which stores them."""
    pages = engine.cache.page_source.alloc(key.pages(GEOMETRY.page_size))
    assert pages is not None
    engine.fill(key, pages, 0)
    inserted = engine.cache.insert(key, pages)
    engine.cache.page_source.free(pages[: inserted.present_pages])
    engine.settle()


def fetch(engine: World, key: RadixKey) -> int:
    """Prefetch `key`, compare what has come to L2, and return how many pages that is."""
    engine.cache._prefetcher.start("r", key)
    engine.until(lambda: engine.cache.check_prefetch_progress("r"))
    engine.settle()
    engine.cache.abort_prefetch("r")
    found = engine.cache.match_prefix(key)
    runs = [node.host for node in engine.cache.tree.span(found.node, found.pages) if node.host is not None]
    pages = np.concatenate([np.empty(0, np.int32), *reversed(runs)])
    for number, page in enumerate(pages.tolist()):
        expected = engine.expected(key, number)
        assert expected is not None and bytes(engine.host.payload(page)) == expected.tobytes()
    return len(pages)


def test_pages_are_found_in_a_file_store_by_the_keys_that_the_engine_gave(tmp_path: Path) -> None:
    first = world(tmp_path / "s")
    compute(first, KEY)
    first.close()
    assert {path.name for path in page_files(tmp_path / "s")} == {page.hex() for page in HASHES}
    second = world(tmp_path / "s")
    longer = RadixKey.of_hashes([*HASHES, b"x" * 32])
    assert fetch(second, longer) == 6
    assert second.cache.statistics().controller.prefetched_pages == 6
    second.close()


def test_a_prefix_on_l2_is_continued_from_storage(tmp_path: Path) -> None:
    first = world(tmp_path / "s")
    compute(first, KEY)
    first.close()
    second = world(tmp_path / "s")
    assert fetch(second, KEY.head(2)) == 2
    assert fetch(second, KEY) == 6
    assert second.cache.statistics().controller.prefetched_pages == 6
    second.close()


def test_equal_hashes_under_two_seeds_share_no_page_on_any_tier(tmp_path: Path) -> None:
    engine = world(tmp_path / "s")
    compute(engine, RadixKey.of_hashes(HASHES, cache_salt="a"))
    for other in (KEY, RadixKey.of_hashes(HASHES, cache_salt="b")):
        assert engine.cache.match_prefix(other).pages == 0
        assert fetch(engine, other) == 0
    assert engine.cache.match_prefix(RadixKey.of_hashes(HASHES, cache_salt="a")).pages == 6
    engine.close()


def test_events_of_given_keys_have_the_keys_and_no_tokens() -> None:
    stream = EventStream(1 << 20)
    tree = RadixTree(4, make_policy("lru"), position_bytes=PAGE_KEY_BYTES, observer=EventRecorder(stream))
    tree.insert(KEY.head(2), np.arange(1, 3, dtype=np.int32))
    tree.insert(KEY, np.arange(3, 9, dtype=np.int32))
    reader, index = stream.subscribe(), PrefixIndex()
    events = reader.drain(100)
    assert [event[1:] for event in events if isinstance(event, Stored)] == [
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
def test_a_cache_that_hashes_tokens_refuses_given_keys_and_says_what_to_use(
    tmp_path: Path, call: str, sessions: bool
) -> None:
    kind = SessionCache if sessions else HiRadixCache
    engine = World(backend=open_file(tmp_path / "s", codec()).backend, kind=kind)
    cache = engine.cache
    with pytest.raises(InvalidInput, match="a cache that takes given page keys"):
        CALLS[call](cache)
    cache.check()
    assert engine.cache.tree.node_count == 0
    engine.close()


def test_a_cache_without_a_tree_refuses_a_request_with_given_keys() -> None:
    with ChunkCache(create_device_pool(GEOMETRY, 4)) as cache:
        with pytest.raises(InvalidInput, match="a cache that takes given page keys"):
            cache.begin_request("r", KEY)
        cache.check()
