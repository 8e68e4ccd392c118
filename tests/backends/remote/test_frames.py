"""The lock by which an engine detects the death of the daemon that has mapped its memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hicache.backends.remote.access import Access
from hicache.backends.remote.client import DaemonClient
from hicache.backends.remote.frames import SharedFrames
from hicache.clock import SYSTEM_CLOCK
from hicache.shared_memory import Layout, SharedMemory


class _Restarting:
    """A client whose daemon restarts, with a new directory for its socket, just before it answers."""

    def __init__(self, lock: Path) -> None:
        self.access = Access(cast(Any, None), "", cast(Any, None), lock, "")
        self.held = -1
        self.clock = SYSTEM_CLOCK

    def call(self, *_: object, **__: object) -> Mapping[str, Any]:
        """Answer as the new daemon."""
        lock = self.access.lock
        assert lock is not None
        lock.unlink()  # systemd removes the directory of a service that has ended
        self.held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.held, fcntl.LOCK_EX)
        return {"mapping": "m"}


def test_the_lock_is_the_one_of_the_daemon_that_answered(tmp_path: Path) -> None:
    """With the previous daemon's lock, the new daemon would seem dead while it touches frames."""
    (tmp_path / "lock").touch()
    client = _Restarting(tmp_path / "lock")
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with contextlib.closing(
        SharedMemory.open(name, Layout(0, 1, 4096, bytes(32)), deadline=time.monotonic() + 10.0)
    ) as memory:
        memory.unlink()
        shared = SharedFrames(memory, cast(DaemonClient, client))
        assert shared.attach(time.monotonic() + 10.0) == "m"
        assert not shared._is_daemon_dead()
        os.close(client.held)
        assert shared._is_daemon_dead(), "the control"
        shared._mapping = None
        shared.detach()
