"""The daemon shared by the tests of a module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.remote.daemon import Daemon, Frames


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory in memory, for a daemon and its store."""
    made = Path(tempfile.mkdtemp(prefix="hicache-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """A running daemon."""
    with Daemon(folder) as made:
        yield made


@pytest.fixture
def frames() -> Iterator[Frames]:
    """Shared memory of this process."""
    made = Frames(64)
    yield made
    made.close()


@pytest.fixture(scope="module")
def memories() -> Iterator[dict[int, Frames]]:
    """Shared memory by frame length."""
    found: dict[int, Frames] = {}
    yield found
    for frames in found.values():
        frames.close()
