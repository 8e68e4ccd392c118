"""The contract of a store that several backends have open at once, as engines do, and that outlives them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ...frame import FrameCodec
from .contract import SoleBackendContract
from .machine import run_machine
from .pages import (
    GET_ERROR,
    HIT,
    MISS,
    PRESENT,
    STORED,
    OpenStore,
    Store,
    churn,
    exists,
    in_threads,
    load,
    make_keys,
    soon,
    store_chain,
)


class BackendContract(SoleBackendContract):
    """Subclass it in a test module and give it the fixture `open_store`."""

    @pytest.fixture
    def second(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Store]:
        """The store of the fixture `store`, opened once more."""
        second = open_store(codec)
        yield second
        second.backend.close()

    def test_two_openings_see_each_others_pages(self, store: Store, second: Store) -> None:
        keys = make_keys(4)
        assert store_chain(store, keys[:2]) == [STORED] * 2
        assert (exists(second, keys), load(second, keys)) == (2, [HIT, HIT, MISS, MISS])
        assert store_chain(second, keys) == [PRESENT, PRESENT, STORED, STORED]
        assert load(store, keys) == [HIT] * 4
        assert second.backend.delete(keys[1:], deadline=soon()) == 3
        assert (exists(store, keys), load(store, keys)) == (1, [HIT, MISS, MISS, MISS])
        assert store.backend.delete(keys, deadline=soon()) == 1

    def test_usage_counts_what_all_openings_stored(self, store: Store, second: Store) -> None:
        keys, size = make_keys(5), store.backend.codec.frame_bytes
        store_chain(store, keys[:2])
        store_chain(second, keys)
        for one in (store, second):
            assert (one.backend.usage().pages, one.backend.usage().bytes) == (5, 5 * size)

    def test_closing_one_opening_leaves_the_other(self, store: Store, second: Store) -> None:
        keys = make_keys(3)
        store_chain(second, keys)
        second.backend.close()
        assert load(second, keys) == [GET_ERROR] * 3
        assert load(store, keys) == [HIT] * 3

    def test_pages_outlive_the_backend_that_stored_them(self, open_store: OpenStore, codec: FrameCodec) -> None:
        keys = make_keys(3)
        first = open_store(codec)
        store_chain(first, keys)
        first.backend.close()
        again = open_store(codec)
        assert (exists(again, keys), load(again, keys)) == (3, [HIT] * 3)
        assert again.backend.usage().pages == 3
        again.backend.close()

    def test_threads_of_two_openings_see_whole_pages_or_none(self, store: Store, second: Store, seed: int) -> None:
        keys, openings = make_keys(12), (store, second)
        in_threads(4, lambda number: churn(openings[number % 2], keys, random.Random(seed + number), rounds=25))
        store.backend.delete(keys, deadline=soon())
        assert (exists(second, keys), second.backend.usage().pages) == (0, 0)
        assert store.backend.statistics().corrupt == second.backend.statistics().corrupt == {}

    def test_a_random_walk_goes_as_in_memory(self, open_store: OpenStore) -> None:
        run_machine(open_store, examples=self.machine_examples, reopens=True)
