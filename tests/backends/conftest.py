"""Directories for the tests of stores."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ._files import OPENED
from .guard.stores import GUARDS

_MEMORY = "/dev/shm"
_SLOW_S = 60.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory if the machine has such a file system: these tests open stores thousands of times, which a
    disk would slow down. Removed after the test."""
    folder = tempfile.mkdtemp(prefix="hicache-test-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a file store, which does not exist yet."""
    return tmp_path / "s"


@pytest.fixture(autouse=True)
def openings_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let openings of file stores end their comparison, on a busy machine too. Tests of the background undo this."""
    monkeypatch.setattr("hicache.backends.file.store.SERVE_AFTER_S", _SLOW_S)


@pytest.fixture(autouse=True)
def stores_end(tmp_path: Path) -> Iterator[None]:
    """Close the stores that a test left open. Depends on `tmp_path` so that the directory still exists then."""
    OPENED.clear()
    yield
    while OPENED:
        OPENED.pop().close()
    while GUARDS:
        GUARDS.pop().close()


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory where pytest creates its own, usually on a disk."""
    folder = tmp_path_factory.mktemp("store")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
