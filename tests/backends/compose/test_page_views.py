"""Compositions: pages in memory of the engine, lookups of single pages, and clearing of namespaces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.backends.compose import Levels, Shards
from hicache.backends.compose.sharded import ShardCodec
from hicache.backends.storage import Storage
from hicache.frame import PageBuffer
from hicache_lab.conformance import (
    HIT,
    MISS,
    STORED,
    bare,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    make_keys,
    soon,
)
from tests.waiting import wait_for

from .._troubled import CODEC, Troubled
from ._parts import COPIES, OPENED, named, settle, stores_of


def views(keys: list[bytes]) -> list[PageBuffer]:
    return [in_parts(CODEC, frame) for frame in full_frames(CODEC, keys)]


def no_views(count: int) -> list[PageBuffer]:
    return [in_parts(CODEC, frame, parts=7) for frame in empty_frames(CODEC, count)]


def put(backend: Storage, keys: list[bytes], pages: Sequence[PageBuffer]) -> object:
    return backend.batch_set(keys, pages, parent=None, deadline=soon())


def levels(*parts: Troubled, copies: int = COPIES) -> Levels:
    backend = Levels(CODEC, named(*stores_of(parts)), cascade_bytes_max=copies)
    OPENED.append(backend)
    return backend


def test_cascade_and_promotion_copy_a_page_in_parts_exactly() -> None:
    fast, slow = Troubled(), Troubled()
    backend, keys = levels(fast, slow), make_keys(5)
    assert put(backend, keys, views(keys)) == [STORED] * 5
    settle(backend)
    stored = [fast.peek(CODEC.namespace, key) for key in keys]
    assert None not in stored and [slow.peek(CODEC.namespace, key) for key in keys] == stored
    fast.remove(CODEC.namespace, keys, soon())
    pages = no_views(5)
    assert backend.batch_get(keys, pages, deadline=soon()) == [HIT] * 5
    assert all(holds(CODEC, key, page) for key, page in zip(keys, pages, strict=True))
    settle(backend)
    assert [fast.peek(CODEC.namespace, key) for key in keys] == stored


def test_a_staged_page_in_parts_keeps_nothing_of_the_page_before_it() -> None:
    """The copier reuses its frame: old bytes in the padding must not be stored under another key."""
    fast, slow = Troubled(), Troubled()
    backend = levels(fast, slow, copies=CODEC.frame_bytes)
    one, two = make_keys(2)
    (frame,) = full_frames(CODEC, [one])
    frame[-16:] = b"\xff" * 16
    put(backend, [one], [frame])
    settle(backend)
    put(backend, [two], views([two]))
    settle(backend)
    assert (fast.peek(CODEC.namespace, one) or b"")[-16:] == b"\xff" * 16
    assert [(slow.peek(CODEC.namespace, key) or b"\1")[-16:] for key in (one, two)] == [bytes(16)] * 2


def test_a_page_exists_if_any_level_has_it_and_each_is_asked_for_the_rest() -> None:
    one, two, keys = Troubled(), Troubled(), make_keys(6)
    put(bare(one, CODEC), [keys[1]], full_frames(CODEC, [keys[1]]))
    put(bare(two, CODEC), [keys[4], keys[1]], full_frames(CODEC, [keys[4], keys[1]]))
    backend = levels(one, two)
    assert backend.batch_has(keys, deadline=soon()) == [False, True, False, False, True, False]
    assert one.called("find") == [tuple(keys)]
    assert two.called("find") == [tuple(key for key in keys if key != keys[1])]
    one.down = True
    assert backend.batch_has(keys, deadline=soon()) == [False, True, False, False, True, False]


def test_a_part_is_asked_for_its_own_pages_in_one_call() -> None:
    codec, keys = ShardCodec(CODEC), make_keys(20)
    parts = [Troubled() for _ in range(3)]
    backend = Shards(codec, named(*stores_of(parts, codec)))
    OPENED.append(backend)
    put(backend, keys[::2], full_frames(CODEC, keys[::2]))
    assert backend.batch_has(keys, deadline=soon()) == [True, False] * 10
    asked = [part.called("find") for part in parts]
    assert sorted(key for (batch,) in asked for key in batch) == sorted(keys)
    parts[0].down = True
    theirs = [key in keys[::2] and backend.placement.part_of(key) != 0 for key in keys]
    assert backend.batch_has(keys, deadline=soon()) == theirs
    parts[0].down = False
    assert backend.clear(deadline=soon()) == 10
    assert [part.count for part in parts] == [0] * 3


def test_clearing_clears_all_levels_and_no_copy_follows() -> None:
    fast, slow = Troubled(), Troubled()
    backend, keys = levels(fast, slow), make_keys(6)
    slow.gate.clear()
    put(backend, keys, full_frames(CODEC, keys))
    wait_for(lambda: slow.at_gate == 1)
    assert backend.clear(deadline=soon(0.02)) in (0, 6)  # waits for the copy in flight until the deadline
    slow.gate.set()
    settle(backend)
    assert backend.clear(deadline=soon()) <= 6
    assert backend.batch_has(keys, deadline=soon()) == [False] * 6
    assert backend.batch_get(keys, empty_frames(CODEC, 6), deadline=soon()) == [MISS] * 6
    assert (fast.count, slow.count) == (0, 0)


@pytest.mark.parametrize("waiting", [True, False])
def test_clearing_drops_waiting_copies(waiting: bool) -> None:
    fast, slow = Troubled(), Troubled()
    backend, keys = levels(fast, slow), make_keys(4)
    slow.gate.clear()
    put(backend, keys[:1], full_frames(CODEC, keys[:1]))
    wait_for(lambda: slow.at_gate == 1)
    put(backend, keys[2:], full_frames(CODEC, keys[2:]))  # another chain, which waits for the first
    with backend._without_copies(None if waiting else [], soon(0.01)):
        slow.gate.set()
    settle(backend)
    assert [slow.peek(CODEC.namespace, key) is not None for key in keys] == [True, False, not waiting, not waiting]
