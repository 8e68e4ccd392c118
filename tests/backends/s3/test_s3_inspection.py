"""A bucket as its operator sees it: every namespace, sealed bytes, conditional writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.s3 import S3Driver
from hicache.backends.s3.objects import object_name, parse_name
from hicache.backends.stored import StoredPages
from hicache.backends.testing import (
    NAMESPACE,
    InspectionContract,
    OpenStore,
    OpenStored,
    make_keys,
)
from hicache.errors import BackendUnavailable
from tests.backends.s3.bucket import CODEC, Bucket, open_s3, options
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
        return lambda: open_it(bucket, unique_prefix)


def open_it(bucket: Bucket, prefix: str, **changes: Any) -> StoredPages:
    return StoredPages(S3Driver(None, options(bucket.url, prefix, bucket=bucket.name, **changes)), "s3")


def test_objects_that_are_not_pages_are_not_listed(bucket: Bucket, unique_prefix: str) -> None:
    bucket.write(object_name(unique_prefix, NAMESPACE, KEYS[0]), b"a page")
    bucket.write(f"{unique_prefix}notes.txt", b"not a page")
    bucket.write(f"{unique_prefix}{NAMESPACE.hex()}/00/{KEYS[0].hex()}", b"in the wrong place")
    store = open_it(bucket, unique_prefix)
    assert [page.key for page in store.pages()] == KEYS[:1]
    store.close()


def test_an_empty_object_differs_from_a_missing_one(bucket: Bucket, unique_prefix: str) -> None:
    store = open_it(bucket, unique_prefix)
    page = StoredPage(NAMESPACE, KEYS[0], 0, None)
    assert store.read(page, 10) is None
    bucket.write(object_name(unique_prefix, NAMESPACE, KEYS[0]), b"")
    assert store.read(page, 10) == b""
    store.close()


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


@pytest.mark.parametrize("verb", ["pages", "read", "write", "remove"])
def test_a_failure_is_an_error_for_an_operator(raw: StoredPages, stub: StubS3, verb: str) -> None:
    page = StoredPage(NAMESPACE, KEYS[0], 1, None)
    stub.fault = lambda request: error(503, "SlowDown")
    verbs: dict[str, Callable[[], object]] = {
        "pages": lambda: list(raw.pages()), "read": lambda: raw.read(page, 1),
        "write": lambda: raw.write(page, b"x", None), "remove": lambda: raw.remove([page]),
    }  # fmt: skip
    with pytest.raises(BackendUnavailable, match="throttled"):
        verbs[verb]()


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
    for bad in (good[2:], good.upper(), good + "0", good.replace("/" + keys[0].hex()[:2] + "/", "/zz/"), "a/", ""):
        assert parse_name("a/", bad) is None
    assert CODEC.namespace == NAMESPACE
