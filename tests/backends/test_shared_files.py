"""The backend of shared files passes the contract without a lock, an index or a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.stored import StoredPages
from hicache.backends.testing import (
    PRESENT,
    SET_ERROR,
    STORED,
    DriverContract,
    InspectionContract,
    OpenStore,
    Subject,
    make_keys,
    open_backend,
    store_chain,
)
from hicache.backends.testing.inspection import OpenStored
from tests.waiting import wait_for

from ._files import CODEC, OPENED
from ._shared import open_shared, shared_options


class TestSharedFiles(DriverContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_shared(tmp_path / "pages", codec)


class TestSharedFilesInspection(InspectionContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda codec: open_shared(tmp_path / "pages", codec)

    @pytest.fixture
    def open_stored(self, tmp_path: Path) -> OpenStored:
        return lambda: StoredPages(SharedFilesDriver(None, shared_options(tmp_path / "pages")), "shared_files")


def test_an_engine_that_starts_during_the_first_listing_of_another_one_writes_after_it(tmp_path: Path) -> None:
    first = SharedFilesDriver(CODEC, shared_options(tmp_path / "pages"))
    assert first.begin_sweep(needs_room=False)
    second = Subject(open_backend("shared_files", CODEC, shared_options(tmp_path / "pages")), bytes, lambda key, data: None)
    OPENED.append(second.backend)
    keys = make_keys(2)
    assert store_chain(second, keys) == [SET_ERROR] * 2
    first.end_sweep(0, 0)
    # Less than the interval between listings.
    wait_for(lambda: store_chain(second, keys) in ([STORED] * 2, [PRESENT] * 2))
    first.close()
