"""Where the tests of stores keep their files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ._files import OPENED

_MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory where there is such a file system: these tests open a store thousands of times, and a
    disk would wait for each of them. Removed after the test."""
    folder = tempfile.mkdtemp(prefix="hicache-test-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def stores_end(tmp_path: Path) -> Iterator[None]:
    """Close what a test has left open. It depends on `tmp_path` so that this is before the directory goes."""
    OPENED.clear()
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory where pytest keeps its own, on a disk as a rule."""
    folder = tmp_path_factory.mktemp("store")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, really."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
