"""The order of eviction in a store with a capacity of its own, and how many pages fit: in memory and in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.order import AdaptivePages
from hicache.backends.store import Store
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    HIT,
    MISS,
    STORED,
    Subject,
    bare,
    exists,
    load,
    make_keys,
    memory_subject,
    store_chain,
)

from ._files import CODEC, FORMS, OPENED, PAGE, check, open_file

REJECTED = SetOutcome.REJECTED
# A compressed page of these tests takes one block, its frame two.
SHORT = 4096
Make = Callable[..., Subject]


@pytest.fixture(params=["memory", "adaptive memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A function that opens a store of this many frames, whose links are checked at the end."""
    made: list[Subject] = []

    def open_it(frames: float, codec: FrameCodec = CODEC) -> Subject:
        capacity = int(frames * PAGE)
        if request.param == "file":
            made.append(open_file(tmp_path / "s", codec, capacity=capacity))
        else:
            driver = MemoryDriver(capacity, AdaptivePages(int(frames)) if "adaptive" in request.param else None)
            OPENED.append(backend := bare(driver, codec))
            made.append(memory_subject(backend, driver))
        return made[-1]

    yield open_it
    for store in made:
        assert isinstance(store.backend, Store)
        if isinstance(store.backend.driver, FileDriver):
            check(store, tmp_path / "s")
        elif isinstance(store.backend.driver, MemoryDriver):
            store.backend.driver.check()


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_full_store_drops_the_tail_of_the_oldest_chain(make: Make, is_chain: bool) -> None:
    """The control: without parents the head goes first."""
    store, old, new = make(8), make_keys(5, "old"), make_keys(5, "new")
    for keys in [old] if is_chain else [[key] for key in old]:
        store_chain(store, keys)
    assert store_chain(store, new) == [STORED] * 5
    assert (exists(store, old), exists(store, new)) == (3 if is_chain else 0, 5)
    assert load(store, old) == [HIT, HIT, HIT, MISS, MISS][:: 1 if is_chain else -1]
    assert store.backend.statistics().evicted_pages == 2


def test_recently_read_pages_stay(make: Make) -> None:
    store, first, second = make(8), make_keys(4, "first"), make_keys(4, "second")
    store_chain(store, first)
    store_chain(store, second)
    assert load(store, first) == [HIT] * 4
    store_chain(store, make_keys(4, "third"))
    assert (exists(store, first), exists(store, second)) == (4, 0)


def test_a_growing_chain_never_evicts_its_own_head(make: Make) -> None:
    store, keys = make(4), make_keys(6)
    store_chain(store, keys[:3])
    assert store_chain(store, keys[3:], parent=keys[2]) == [STORED, REJECTED, REJECTED]
    assert exists(store, keys) == 4


def test_a_batch_larger_than_the_store_keeps_its_head(make: Make) -> None:
    store, keys = make(3.5), make_keys(5)
    store_chain(store, make_keys(2, "older"))
    assert store_chain(store, keys) == [STORED] * 3 + [REJECTED] * 2
    assert exists(store, keys) == 3


@pytest.mark.parametrize("form", FORMS)
def test_as_many_pages_fit_as_their_real_lengths_allow(make: Make, form: str) -> None:
    store, keys = make(10, FORMS[form]), make_keys(30)
    for key in keys:
        store_chain(store, [key])
    usage, size = store.backend.usage(), SHORT if "zstd" in form else PAGE
    # A file store reserves room for a whole frame while a page is written, so its last block stays free.
    assert usage.pages in ((19, 20) if "zstd" in form else (10,)) and usage.bytes == usage.pages * size
    assert store.backend.statistics().evicted_pages == 30 - usage.pages
