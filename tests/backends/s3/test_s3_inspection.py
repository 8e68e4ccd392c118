"""A bucket as its operator sees it: every namespace, sealed bytes, conditional writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from hicache.backends.base import StoredPage, Usage
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.driver import object_name, parse_name
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable
from hicache_lab.conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    InspectionContract,
    OpenStore,
    OpenStored,
    Subject,
    make_keys,
    store_chain,
)
from tests.backends.s3.bucket import PAGE, Bucket, open_s3, options
from tests.backends.s3.stub import StubS3, error, reply

KEYS = make_keys(5)


class TestInspection(InspectionContract):
    """Against the contract."""

    counts_removals = False

    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec)

    @pytest.fixture
    def open_stored(self, bucket: Bucket, unique_prefix: str) -> OpenStored:
        return lambda: StoredPages(S3Driver(None, options(bucket.url, unique_prefix, bucket=bucket.name)), "s3")


def test_an_empty_object_differs_from_a_missing_one(raw: StoredPages, stub: StubS3) -> None:
    page = StoredPage(NAMESPACE, KEYS[0], 0, None)
    assert raw.read(page, 10) is None
    stub.objects[object_name("test/", NAMESPACE, KEYS[0])] = b""
    assert raw.read(page, 10) == b""


def test_a_listing_of_several_parts_is_read_to_its_end(raw: StoredPages, stub: StubS3) -> None:
    keys = make_keys(2500)
    stub.objects.update({object_name("test/", NAMESPACE, key): b"x" for key in keys})
    pages = list(raw.pages())
    assert sorted(page.key for page in pages) == sorted(keys)
    stub.forget_requests()
    assert raw.remove(pages) == 2500
    assert stub.methods() == ["POST"] * 3
    assert stub.objects == {}


def test_usage_counts_only_the_pages_of_the_engines_namespace(store: Subject, stub: StubS3) -> None:
    """Other objects, each with one property that the engine's pages do not have."""
    store_chain(store, KEYS[:2])
    mine = object_name("test/", NAMESPACE, KEYS[2])
    other = object_name("test/", OTHER_NAMESPACE, KEYS[2])
    for foreign in (other, f"away/{mine}", mine.replace("test/", "away/"), f"{mine}0", mine.upper()):
        stub.objects[foreign] = b"of another user"
    assert store.backend.usage() == Usage(2, 2 * PAGE, None)
    stub.objects[mine] = b"a page"
    assert store.backend.usage() == Usage(3, 2 * PAGE + 6, None)


def test_a_listing_with_few_fields_is_accepted(raw: StoredPages, stub: StubS3) -> None:
    names = f"<Contents><Key>{object_name('test/', NAMESPACE, KEYS[0])}</Key></Contents><Contents/>"
    listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{names}</ListBucketResult>".encode()
    stub.fault = lambda request: reply(200, listing) if request.is_list else None
    assert list(raw.pages()) == [StoredPage(NAMESPACE, KEYS[0], 0, None)]


def test_pages_that_cannot_be_removed_are_an_error(raw: StoredPages, stub: StubS3) -> None:
    pages = [StoredPage(NAMESPACE, key, 1, None) for key in KEYS[:2]]
    stub.fault = lambda request: reply(
        200, b"<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    )
    with pytest.raises(BackendUnavailable, match="1 of 2 pages"):
        raw.remove(pages)


def test_a_failure_is_an_error_for_an_operator(raw: StoredPages, stub: StubS3) -> None:
    page = StoredPage(NAMESPACE, KEYS[0], 1, None)
    stub.fault = lambda request: error(503, "SlowDown")
    verbs: list[Callable[[], object]] = [
        lambda: list(raw.pages()), lambda: raw.read(page, 1), lambda: raw.write(page, b"x", None),
        lambda: raw.remove([page]),
    ]
    for verb in verbs:
        with pytest.raises(BackendUnavailable, match="throttled"):
            verb()


def test_a_full_store_has_no_room_for_a_page(raw: StoredPages, stub: StubS3) -> None:
    stub.fault = lambda request: error(507, "InsufficientStorage")
    assert not raw.write(StoredPage(NAMESPACE, KEYS[0], 1, None), b"x", None)


def test_names_are_parsed_back_to_pages_and_spread_over_prefixes() -> None:
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(200)]
    names = [object_name("a/", NAMESPACE, key) for key in keys]
    assert [parse_name("a/", name) for name in names] == [(NAMESPACE, key) for key in keys]
    assert all(name.startswith(f"a/{NAMESPACE.hex()}/") for name in names)
    assert len({name.rpartition("/")[0] for name in names}) > 100
    good = object_name("a/", NAMESPACE, keys[0])
    wrong_place = good.replace(f"/{keys[0].hex()[:2]}/", "/00/")
    for bad in (good[2:], good.upper(), good + "0", wrong_place, "a/notes.txt", "a/", ""):
        assert parse_name("a/", bad) is None
