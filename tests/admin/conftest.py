"""A running engine with a file store and an admin socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.compose import copier
from tests.admin.running import RunningEngine, file_config
from tests.waiting import WAIT_S


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunningEngine]:
    with RunningEngine(file_config(tmp_path)) as running:
        yield running


@pytest.fixture
def levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningEngine]:
    """An engine whose storage has two stores: `ram` and `disk`. A copy between them may take long."""
    monkeypatch.setattr(copier, "_CALL_S", WAIT_S)
    parts = [
        {"name": "ram", "type": "memory", "options": {}},
        {"name": "disk", "type": "file", "options": {"path": tmp_path / "store", "free_space_floor": 0}},
    ]
    with RunningEngine(file_config(tmp_path, storage={"type": "levels", "options": {"levels": parts}})) as running:
        yield running
