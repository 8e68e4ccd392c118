"""Shared files on two clients of a GlusterFS server, with the caches of a usual client and without: `make shared`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_lab.conformance import (
    GET_ERROR,
    HIT,
    SET_ERROR,
    STORED,
    OpenStore,
    SampleContract,
    empty_frames,
    full_frames,
    load,
    make_keys,
    store_chain,
)
from tests.backends._shared import open_shared
from tests.waiting import wait_for

from .mounts import SharedMounts, shared_mounts, unavailable
from .nodes import check_two_nodes

KINDS = ("gluster", "gluster-uncached")
THREADS = 4
_REASON = unavailable("gluster")
pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


@pytest.fixture(scope="module")
def clients() -> Iterator[SharedMounts]:
    with shared_mounts("gluster-uncached") as mounts:
        yield mounts


class TestTwoClients(SampleContract):
    """Without caches: with them a client may see a removed page for a second."""

    machine_examples = 2
    churn_rounds = 4

    @pytest.fixture
    def open_store(self, clients: SharedMounts, tmp_path: Path) -> OpenStore:
        turns = itertools.cycle(clients.paths)
        return lambda codec: open_shared(next(turns) / tmp_path.name, codec)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_read_and_evict_through(kind: str, tmp_path: Path) -> None:
    with shared_mounts(kind) as mounts:
        check_two_nodes(mounts, tmp_path, seconds=20.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_server_costs_calls_their_deadline_and_the_store_works_again_after_it(kind: str) -> None:
    with shared_mounts(kind) as mounts:
        store = open_shared(mounts.paths[0] / "store", io_threads=THREADS)
        codec, old, new = store.backend.codec, make_keys(THREADS), make_keys(2, "new")
        store_chain(store, old)
        other = open_shared(mounts.paths[1] / "store", io_threads=THREADS)
        assert load(other, old) == [HIT] * len(old)
        # Not read here before, so that no cache has them.
        store_chain(other, later := make_keys(THREADS, "later"))
        read, written = empty_frames(codec, len(later)), full_frames(codec, new)
        mounts.stop()
        try:
            found = store.backend.batch_get(later, read, deadline=time.monotonic() + 2.0)
            assert found == [GET_ERROR] * len(later)
            before = [bytes(page) for page in read]
            outcomes = store.backend.batch_set(new, written, parent=None, deadline=time.monotonic() + 2.0)
            assert outcomes == [SET_ERROR] * len(new)
            assert store.backend.statistics().errors["hangs"] == len(new)
            assert mounts.hang
        finally:
            mounts.resume()
        wait_for(lambda: store_chain(store, new) == [STORED] * len(new))
        assert load(store, [*old, *later, *new]) == [HIT] * (len(old) + len(later) + len(new))
        assert [bytes(page) for page in read] == before
        for opened in (store, other):
            opened.backend.close()
