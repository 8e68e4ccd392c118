"""A running engine with a file store and an admin socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.running import RunningEngine, file_config


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunningEngine]:
    with RunningEngine(file_config(tmp_path)) as running:
        yield running


@pytest.fixture
def levels(tmp_path: Path) -> Iterator[RunningEngine]:
    """An engine whose storage has two stores: `ram` and `disk`."""
    parts = [
        {"name": "ram", "type": "memory", "options": {}},
        {"name": "disk", "type": "file", "options": {"path": tmp_path / "store", "free_space_floor": 0}},
    ]
    with RunningEngine(file_config(tmp_path, storage={"type": "levels", "options": {"levels": parts}})) as running:
        yield running
