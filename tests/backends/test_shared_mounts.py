"""Shared files through two mounts of one directory, as two machines have them.

The mounts are those of bindfs with locks of their own, which makes every lock between machines useless. `make shared`
has longer tests, also on GlusterFS.
"""

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
from tests.shared_mounts.mounts import SharedMounts, shared_mounts, unavailable
from tests.shared_mounts.nodes import Nodes, check_two_nodes, jobs_of
from tests.waiting import wait_for

from ._files import Leftovers
from ._shared import open_shared

pytestmark = [pytest.mark.servers, pytest.mark.long]
_REASON = unavailable("bindfs")
needs_bindfs = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

THREADS = 4
# Of a call that must return although the mount hangs.
DEADLINE_S = 2.0


@pytest.fixture(scope="module")
def two_mounts() -> Iterator[SharedMounts]:
    with shared_mounts("bindfs") as mounts:
        yield mounts


@needs_bindfs
class TestTwoMounts(SampleContract):
    @pytest.fixture
    def open_store(self, two_mounts: SharedMounts, tmp_path: Path) -> OpenStore:
        turns = itertools.cycle(two_mounts.paths)
        return lambda codec: open_shared(next(turns) / tmp_path.name, codec)


@needs_bindfs
def test_two_processes_write_read_and_evict_without_locks(tmp_path: Path) -> None:
    with shared_mounts("bindfs") as mounts:
        check_two_nodes(mounts, tmp_path, seconds=4.0)


@needs_bindfs
def test_a_writer_without_a_rename_is_noticed(tmp_path: Path) -> None:
    """The control of the test above."""
    with shared_mounts("bindfs") as mounts, Nodes(tmp_path) as nodes:
        jobs = jobs_of(mounts, backend="tests.shared_mounts.node:InPlace", chains=24)
        children = [nodes.start(job) for job in jobs]
        wait_for(lambda: any(child.troubles() for child in children))
        for child in children:
            child.end()


@needs_bindfs
def test_calls_on_a_hung_mount_end_at_their_deadline_and_the_store_works_again_after_it(tmp_path: Path) -> None:
    left = Leftovers()
    with shared_mounts("bindfs") as mounts:
        store = open_shared(mounts.paths[0] / "store", io_threads=THREADS)
        codec, old, new = store.backend.codec, make_keys(THREADS), make_keys(2, "new")
        store_chain(store, old)
        read, written = empty_frames(codec, len(old)), full_frames(codec, new)
        mounts.stop()
        try:
            found = store.backend.batch_get(old, read, deadline=time.monotonic() + DEADLINE_S)
            assert found == [GET_ERROR] * len(old)
            before = [bytes(page) for page in (*read, *written)]
            assert store.backend.batch_set(
                new, written, parent=None, deadline=time.monotonic() + DEADLINE_S
            ) == [SET_ERROR] * len(new)
            assert store.backend.statistics().errors["hangs"] == len(new)
            assert mounts.hang
        finally:
            mounts.resume()
        wait_for(lambda: store_chain(store, new) == [STORED] * len(new))
        assert load(store, old + new) == [HIT] * len(old + new)
        assert [bytes(page) for page in read] == before[: len(read)]
        store.backend.close()
    wait_for(lambda: left.found() == (0, []))


@needs_bindfs
def test_a_process_ends_while_its_mount_hangs(tmp_path: Path) -> None:
    with shared_mounts("bindfs") as mounts, Nodes(tmp_path) as nodes:
        node = nodes.start(jobs_of(mounts, deadline_s=1.0)[0])
        wait_for(lambda: node.is_open)
        mounts.stop()
        try:
            node.end()
            assert mounts.hang
        finally:
            mounts.resume()
        assert node.find("report")
