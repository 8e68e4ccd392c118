"""Objects with a maximum age, on a real SeaweedFS."""

from __future__ import annotations

import contextlib

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.registry import BackendSpec, open_stored
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, MISS, STORED, empty_frames
from hicache_lab.devservers import SeaweedServer
from tests.backends._retention import (
    EDGE_S,
    FAR,
    KEYS,
    MAX_AGE_S,
    RetentionContract,
    Stores,
    codec_at,
    get,
    put,
    settle,
)
from tests.backends.s3.bucket import Bucket
from tests.clocks import At
from tests.waiting import wait_for


def spec_of(seaweed: SeaweedServer, prefix: str) -> BackendSpec:
    return BackendSpec(*seaweed.storage(prefix=prefix))


class TestS3Retention(RetentionContract):
    @pytest.fixture
    def spec(self, seaweed: SeaweedServer, bucket: Bucket, unique_prefix: str) -> BackendSpec:
        return spec_of(seaweed, unique_prefix)


def listed(spec: BackendSpec) -> list[StoredPage]:
    with contextlib.closing(open_stored(spec)) as stored:
        return list(stored.pages())


def test_a_copied_object_is_not_served_beyond_its_age_but_swept_by_its_own(
    seaweed: SeaweedServer, bucket: Bucket, unique_prefix: str
) -> None:
    clock, spec = ManualClock(), spec_of(seaweed, unique_prefix)
    old, began_s = codec_at(At(clock.wall_s() - 1000.0)), clock.wall_s()
    with contextlib.closing(Stores(spec, clock)) as stores:
        with contextlib.closing(stores.open(codec=old)) as earlier:
            assert put(earlier, KEYS) == [STORED] * 3
            frames = empty_frames(old, 1)
            assert earlier.batch_get(KEYS[:1], frames, deadline=FAR) == [HIT]
        aged = stores.open(MAX_AGE_S)
        assert all(page.stored_s is not None and page.stored_s >= began_s - 60.0 for page in listed(spec))
        clock.advance(MAX_AGE_S - 1000.0 - EDGE_S)
        assert get(aged, KEYS) == [HIT] * 3
        clock.advance(100.0)
        settle(aged, clock)
        assert len(listed(spec)) == 3, "a sweep goes by the time of the object"
        assert get(aged, KEYS[:2]) == [MISS] * 2
        clock.advance(1000.0)
        wait_for(lambda: listed(spec) == [], lambda: clock.advance(10.0), pause_s=0.05)
