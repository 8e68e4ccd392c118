"""The contract of raw stores, on which `hicache ls`, `copy` and `purge` rely."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

import pytest

from ...frame import FrameCodec
from ..raw import RawStore, StoredPage
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

OpenRaw: TypeAlias = Callable[[], RawStore]
# The tolerance for a store's clock, including its rounding.
_CLOCK_S = 120.0


def by_key(pages: Iterator[StoredPage]) -> dict[bytes, StoredPage]:
    """Return the pages of one namespace by key; fail if a page comes twice."""
    found = list(pages)
    keyed = {page.key: page for page in found}
    assert len(keyed) == len(found), "a page was listed twice"
    return keyed


class RawContract(ContractFixtures):
    """The contract of a RawStore. Subclass it and add the fixtures `open_store` and `open_raw`, which open the same
    store."""

    # False for a store whose server does not report which pages were stored: S3 also accepts to delete missing objects.
    counts_removals: ClassVar[bool] = True

    @pytest.fixture
    @abstractmethod
    def open_raw(self) -> OpenRaw:
        """Return a function that opens this test's raw store. It is called after a backend has opened the store."""

    @pytest.fixture
    def raw(self, store: Subject, open_raw: OpenRaw) -> Iterator[RawStore]:
        assert not store.backend.usage().pages, "the store must be empty at first"
        raw = open_raw()
        yield raw
        raw.close()

    def test_an_empty_store_has_no_pages(self, raw: RawStore) -> None:
        assert list(raw.pages()) == []
        assert raw.remove([]) == 0

    def test_all_pages_of_all_namespaces_are_listed(self, store: Subject, open_store: OpenStore, raw: RawStore) -> None:
        other = open_store(FrameCodec(OTHER_NAMESPACE, 2 * PAYLOAD_BYTES))
        ours, theirs = make_keys(5), make_keys(3)
        store_chain(store, ours)
        store_chain(other, theirs)
        listed = list(raw.pages())
        assert sorted((page.namespace, page.key, page.bytes) for page in listed) == sorted(
            [(NAMESPACE, key, store.backend.codec.frame_bytes) for key in ours]
            + [(OTHER_NAMESPACE, key, other.backend.codec.frame_bytes) for key in theirs]
        )
        now = time.time()
        assert all(page.used_s is None or abs(page.used_s - now) < _CLOCK_S for page in listed)
        other.backend.close()

    @pytest.mark.parametrize("digits", [1, 2, 7, 64])
    def test_a_listing_can_select_namespaces(
        self, store: Subject, open_store: OpenStore, raw: RawStore, digits: int
    ) -> None:
        other = open_store(FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
        keys = make_keys(2)
        store_chain(store, keys)
        store_chain(other, keys)
        prefix = NAMESPACE.hex()[:digits]
        expected = {digest for digest in (NAMESPACE, OTHER_NAMESPACE) if digest.hex().startswith(prefix)}
        assert {page.namespace for page in raw.pages(prefix)} == expected
        other.backend.close()

    def test_pages_are_read_as_stored(self, store: Subject, raw: RawStore) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        for key, page in by_key(raw.pages()).items():
            whole = store.read(key)
            assert whole is not None and len(whole) == page.bytes
            assert raw.read(page, page.bytes) == raw.read(page, 10 * page.bytes) == whole
            assert raw.read(page, 256) == whole[:256]

    def test_damaged_pages_are_listed_and_read_too(self, store: Subject, raw: RawStore) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        store.write(keys[1], b"no page")
        page = by_key(raw.pages())[keys[1]]
        assert (page.bytes, raw.read(page, 256)) == (7, b"no page")

    def test_a_missing_page_reads_as_none_and_is_not_removed_again(self, store: Subject, raw: RawStore) -> None:
        store_chain(store, make_keys(3))
        pages = list(raw.pages())
        assert raw.remove(pages[:1]) == 1
        assert raw.read(pages[0], 256) is None
        assert raw.remove(pages) == (2 if self.counts_removals else 3)
        assert list(raw.pages()) == []

    def test_removed_pages_are_misses(self, store: Subject, raw: RawStore) -> None:
        keys = make_keys(4)
        store_chain(store, keys)
        listed = by_key(raw.pages())
        assert raw.remove([listed[keys[2]], listed[keys[3]]]) == 2
        assert load(store, keys) == [HIT, HIT, MISS, MISS]
        assert store.backend.usage().pages == 2

    def test_pages_can_be_removed_while_they_are_listed(self, store: Subject, raw: RawStore) -> None:
        store_chain(store, make_keys(40))
        assert sum(raw.remove([page]) for page in raw.pages()) == 40
        assert list(raw.pages()) == []

    def test_written_pages_are_hits(self, store: Subject, raw: RawStore) -> None:
        keys, codec = make_keys(3), store.backend.codec
        for key, data, parent in zip(keys, sealed(codec, keys), [None, *keys[:-1]], strict=True):
            assert raw.write(StoredPage(codec.namespace, key, len(data), time.time()), data, parent)
        assert (exists(store, keys), load(store, keys)) == (3, [HIT] * 3)
        assert store.backend.usage().pages == 3
        assert store_chain(store, keys) == [PRESENT] * 3

    def test_a_stored_page_is_not_overwritten(self, store: Subject, raw: RawStore) -> None:
        (key,) = make_keys(1)
        store_chain(store, [key])
        (page,) = raw.pages()
        before = store.read(key)
        assert not raw.write(page, bytes(page.bytes), None)
        assert store.read(key) == before

    def test_a_page_can_be_written_to_a_namespace_that_is_not_open(self, raw: RawStore) -> None:
        codec = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
        (key,) = make_keys(1)
        (data,) = sealed(codec, [key])
        assert raw.write(StoredPage(OTHER_NAMESPACE, key, len(data), None), data, None)
        (page,) = raw.pages(OTHER_NAMESPACE.hex())
        assert (page.key, raw.read(page, page.bytes)) == (key, data)
        assert raw.remove([page]) == 1

    def test_an_object_that_replaced_a_listed_one_stays_if_the_store_can_tell(
        self, store: Subject, raw: RawStore
    ) -> None:
        (key,) = make_keys(1)
        store_chain(store, [key])
        (page,) = raw.pages()
        store.write(key, b"another object")
        raw.remove([page])
        assert store.read(key) == (None if page.identity is None else b"another object")
        raw.remove(list(raw.pages()))
        assert list(raw.pages()) == []

    def test_closing_twice_is_fine(self, raw: RawStore) -> None:
        raw.close()
        raw.close()
