"""The backend of shared files passes the contract without a lock, an index or a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.stored import StoredPages
from hicache.backends.testing import DriverContract, InspectionContract, OpenStore
from hicache.backends.testing.inspection import OpenStored

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
