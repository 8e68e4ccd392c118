"""The S3 backend passes the contract on a real SeaweedFS, and on a server without conditional writes; its capacity."""

from __future__ import annotations

import contextlib

import pytest

from hicache.backends.base import SetOutcome, Usage
from hicache_lab.conformance import (
    HIT,
    MISS,
    STORED,
    DriverContract,
    OpenStore,
    SampleContract,
    Subject,
    load,
    make_keys,
    open_backend,
    store_chain,
)
from hicache_lab.devservers import SeaweedServer
from tests.backends.s3.bucket import CODEC, PAGE, Bucket, open_on, open_s3
from tests.backends.s3.stub import StubS3, error
from tests.waiting import wait_for


class TestS3(DriverContract):
    machine_examples = 10

    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec)


class TestWithoutConditions(SampleContract):
    """Pages are looked up before they are stored."""

    @pytest.fixture
    def open_store(self, stub: StubS3) -> OpenStore:
        stub.fault = lambda request: error(501, "NotImplemented") if "if-none-match" in request.headers else None
        return lambda codec: open_on(stub, codec)


PAGES = 40
OLD, OTHER, NEW, MORE = make_keys(18, "old"), make_keys(18, "other"), make_keys(4, "new"), make_keys(10, "more")


def open_it(seaweed: SeaweedServer, bucket: Bucket, prefix: str, capacity_bytes: int | None) -> Subject:
    type_name, options = seaweed.storage(prefix=prefix, capacity=capacity_bytes)
    return Subject(open_backend(type_name, CODEC, options), lambda key: None, lambda key, data: None)


def test_the_ends_of_unused_chains_are_evicted(seaweed: SeaweedServer, bucket: Bucket, unique_prefix: str) -> None:
    """The first stored chain is read again and stays. For the others, a bucket has only the second in which they were
    stored, so either may lose its tail."""
    with contextlib.closing(open_it(seaweed, bucket, unique_prefix, None).backend) as unlimited:
        store = Subject(unlimited, lambda key: None, lambda key, data: None)
        assert store_chain(store, OLD) + store_chain(store, OTHER) == [STORED] * 36
    store = open_it(seaweed, bucket, unique_prefix, PAGES * PAGE)
    with contextlib.closing(store.backend) as limited:
        assert load(store, OLD) == [HIT] * 18
        assert store_chain(store, NEW) == [STORED] * 4
        wait_for(lambda: limited.statistics().evicted_pages > 0)
        assert limited.statistics().evicted_pages == 4
        assert load(store, OLD) == [HIT] * 18
        others = [load(store, chain) for chain in (OTHER, NEW)]
        assert sum(outcomes.count(HIT) for outcomes in others) == 18
        for outcomes in others:
            assert outcomes == [HIT] * outcomes.count(HIT) + [MISS] * outcomes.count(MISS), "a chain has a hole"
        assert limited.usage() == Usage(36, 36 * PAGE, PAGES * PAGE)
        stored = store_chain(store, MORE)
        head = stored.count(STORED)
        assert 0 < head < 10 and stored == [STORED] * head + [SetOutcome.REJECTED] * (10 - head)
        assert dict(limited.statistics().errors) == {}
    with contextlib.closing(open_it(seaweed, bucket, unique_prefix, None).backend) as unlimited:
        rest = store_chain(Subject(unlimited, lambda key: None, lambda key, data: None), MORE)
        assert all(outcome.is_stored for outcome in rest), "the control: without a capacity there is room"
