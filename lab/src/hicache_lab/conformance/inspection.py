"""The contract of drivers that `Inspects` describes, on which `hicache ls`, `copy` and `purge` rely."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, TypeAlias

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.stored import StoredPages
from hicache.frame import FrameCodec

from .pages import (
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    ContractFixtures,
    OpenStore,
    Subject,
    exists,
    load,
    make_keys,
    sealed,
    store_chain,
)

OpenStored: TypeAlias = Callable[[], StoredPages]
# The tolerance for a store's clock, including its rounding.
_CLOCK_S = 120.0


def by_key(pages: Iterator[StoredPage]) -> dict[bytes, StoredPage]:
    """Return the pages of one namespace by key; fail if a page comes twice."""
    found = list(pages)
    keyed = {page.key: page for page in found}
    assert len(keyed) == len(found), "a page was listed twice"
    return keyed


class InspectionContract(ContractFixtures):
    """The contract of a driver that operators' tools can work on. Subclass it and add the fixtures `open_store` and
    `open_stored`, which open the same store."""

    # False for a store whose server does not report which pages were stored: S3 also accepts to delete missing objects.
    counts_removals: ClassVar[bool] = True
    # False for a driver that cannot tell an object from one that has replaced it since.
    tells_replaced: ClassVar[bool] = True

    @pytest.fixture
    @abstractmethod
    def open_stored(self) -> OpenStored:
        """Return a function that opens the pages of this test's store for an operator. It is called after a driver has
        opened the store."""

    @pytest.fixture
    def stored(self, store: Subject, open_stored: OpenStored) -> Iterator[StoredPages]:
        assert not store.backend.usage().pages, "the store must be empty at first"
        stored = open_stored()
        yield stored
        stored.close()

    def test_an_empty_store_has_no_pages(self, stored: StoredPages) -> None:
        assert list(stored.pages()) == []
        assert stored.remove([]) == 0

    def test_all_pages_of_all_namespaces_are_listed(
        self, store: Subject, open_store: OpenStore, stored: StoredPages
    ) -> None:
        other = open_store(FrameCodec(OTHER_NAMESPACE, 2 * PAYLOAD_BYTES))
        ours, theirs = make_keys(5), make_keys(3)
        store_chain(store, ours)
        store_chain(other, theirs)
        listed = list(stored.pages())
        assert sorted((page.namespace, page.key, page.bytes) for page in listed) == sorted(
            [(NAMESPACE, key, store.backend.codec.frame_bytes) for key in ours]
            + [(OTHER_NAMESPACE, key, other.backend.codec.frame_bytes) for key in theirs]
        )
        now = time.time()
        assert all(page.used_s is None or abs(page.used_s - now) < _CLOCK_S for page in listed)
        other.backend.close()

    def test_a_listing_can_select_namespaces(
        self, store: Subject, open_store: OpenStore, stored: StoredPages
    ) -> None:
        other = open_store(FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
        keys = make_keys(2)
        store_chain(store, keys)
        store_chain(other, keys)
        for prefix in (NAMESPACE.hex()[:1], NAMESPACE.hex()[:7], NAMESPACE.hex()):
            expected = {digest for digest in (NAMESPACE, OTHER_NAMESPACE) if digest.hex().startswith(prefix)}
            assert {page.namespace for page in stored.pages(prefix)} == expected
        other.backend.close()

    def test_pages_are_read_as_stored(self, store: Subject, stored: StoredPages) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        for key, page in by_key(stored.pages()).items():
            whole = store.read(key)
            assert whole is not None and len(whole) == page.bytes
            assert stored.read(page, page.bytes) == stored.read(page, 10 * page.bytes) == whole
            assert stored.read(page, 256) == whole[:256]

    def test_damaged_pages_are_listed_and_read_too(self, store: Subject, stored: StoredPages) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        store.write(keys[1], b"no page")
        page = by_key(stored.pages())[keys[1]]
        assert (page.bytes, stored.read(page, 256)) == (7, b"no page")

    def test_a_missing_page_reads_as_none_and_is_not_removed_again(self, store: Subject, stored: StoredPages) -> None:
        store_chain(store, make_keys(3))
        pages = list(stored.pages())
        assert stored.remove(pages[:1]) == 1
        assert stored.read(pages[0], 256) is None
        assert stored.remove(pages) == (2 if self.counts_removals else 3)
        assert list(stored.pages()) == []

    def test_only_the_object_that_was_read_is_removed(self, store: Subject, stored: StoredPages) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        read = [replace(page, identity=(stored.find(page, page.bytes) or (b"", None))[1]) for page in stored.pages()]
        store.write(keys[0], b"x" * store.backend.codec.frame_bytes)
        assert stored.remove(read) == 2 - self.tells_replaced
        assert [store.read(key) is None for key in keys] == [not self.tells_replaced, True]

    def test_removed_pages_are_misses(self, store: Subject, stored: StoredPages) -> None:
        keys = make_keys(4)
        store_chain(store, keys)
        listed = by_key(stored.pages())
        assert stored.remove([listed[keys[2]], listed[keys[3]]]) == 2
        assert load(store, keys) == [HIT, HIT, MISS, MISS]
        assert store.backend.usage().pages == 2

    def test_pages_can_be_removed_while_they_are_listed(self, store: Subject, stored: StoredPages) -> None:
        store_chain(store, make_keys(40))
        assert sum(stored.remove([page]) for page in stored.pages()) == 40
        assert list(stored.pages()) == []

    def test_written_pages_are_hits(self, store: Subject, stored: StoredPages) -> None:
        keys, codec = make_keys(3), store.backend.codec
        for key, data, parent in zip(keys, sealed(codec, keys), [None, *keys[:-1]], strict=True):
            assert stored.write(StoredPage(codec.namespace, key, len(data), time.time()), data, parent)
        assert (exists(store, keys), load(store, keys)) == (3, [HIT] * 3)
        assert store.backend.usage().pages == 3
        assert store_chain(store, keys) == [PRESENT] * 3

    def test_a_stored_page_is_not_overwritten(self, store: Subject, stored: StoredPages) -> None:
        (key,) = make_keys(1)
        store_chain(store, [key])
        (page,) = stored.pages()
        before = store.read(key)
        assert not stored.write(page, bytes(page.bytes), None)
        assert store.read(key) == before

    def test_a_page_can_be_written_to_a_namespace_that_is_not_open(self, stored: StoredPages) -> None:
        codec = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
        (key,) = make_keys(1)
        (data,) = sealed(codec, [key])
        assert stored.write(StoredPage(OTHER_NAMESPACE, key, len(data), None), data, None)
        (page,) = stored.pages(OTHER_NAMESPACE.hex())
        assert (page.key, stored.read(page, page.bytes)) == (key, data)
        assert stored.remove([page]) == 1

    def test_an_object_that_replaced_a_listed_one_stays_if_the_store_can_tell(
        self, store: Subject, stored: StoredPages
    ) -> None:
        (key,) = make_keys(1)
        store_chain(store, [key])
        (page,) = stored.pages()
        store.write(key, b"another object")
        stored.remove([page])
        assert store.read(key) == (None if page.identity is None else b"another object")
        stored.remove(list(stored.pages()))
        assert list(stored.pages()) == []

    def test_closing_twice_is_fine(self, stored: StoredPages) -> None:
        stored.close()
        stored.close()
