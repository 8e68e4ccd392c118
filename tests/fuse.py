"""Real FUSE mounts of a directory, as a network file system gives them: each with a device and locks of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(source: Path, *targets: Path) -> Iterator[None]:
    """Mount `source` at each of the targets, which are created, with bindfs. Skips the test if that is not possible."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        pytest.skip("needs bindfs, /dev/fuse and root")
    with contextlib.ExitStack() as ends:
        for target in targets:
            target.mkdir()
            made = subprocess.run(["bindfs", str(source), str(target)], check=False, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"bindfs cannot mount: {made.stderr.strip()}")
            ends.callback(subprocess.run, ["umount", "--lazy", str(target)], check=True)
        yield
