"""Frames that a daemon on this host reads and writes itself: memory that both have mapped.

A verb must not return while the daemon can still access a frame, because its caller then uses the frame for another
page. A reply guarantees that. Without one, after a lost connection or a deadline, the verb waits in `fence` until

- the daemon has detached the memory: it replies after all operations on it have ended, and rejects the waiting ones,
  because they name the removed mapping; or
- the daemon is dead: it keeps a file locked while it runs, and a new daemon starts only after that.

The next call maps the memory again. A daemon that hangs blocks such a verb, as any store does.

Locking design: `_state` guards the fields of a memory; it is held while the daemon maps the memory, so that one thread
requests it, but not during a fence. `_fencing` is held during a fence, by one thread; other threads do not need another
fence for the same mapping.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...backoff import Backoff
from ...frame import PageBuffer, PageView
from ...shared_memory import SharedMemory, find
from ..errors import StoreError
from .client import DaemonClient, Refused

# The first tries of a fence are for a daemon that has only lost a connection.
_FENCE_S_MIN = 0.01
_FENCE_S_MAX = 0.5
# One try: a daemon with operations in flight replies when they end, or requests another try.
_DETACH_S = 2.0
# The time for a daemon to map memory, and the pause after a rejection.
_ATTACH_S = 10.0
_REFUSED_S = 1.0


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Consecutive pages of a call, `part`, in the frames `numbers` of one memory, with the daemon's `mapping` of it."""

    part: slice
    shared: SharedFrames
    mapping: str
    numbers: Sequence[int]


class SharedFrames:
    """One shared memory of this process, and whether the daemon has it mapped."""

    def __init__(self, memory: SharedMemory, client: DaemonClient) -> None:
        self.memory = memory
        self._client = client
        self._clock = client.clock
        self._path = f"/v1/memory/{memory.name}"
        self._state = threading.Lock()
        self._fencing = threading.Lock()
        self._mapping: str | None = None
        self._lock_file: int | None = None
        self._retry_at_s = -math.inf
        self._fenced: str | None = None

    def attach(self, deadline: float) -> str | None:
        """Return the id of the daemon's mapping of this memory; the daemon creates it if necessary. Return None for a
        while after a failure. Blocks. Raises Refused if the daemon cannot map it, and StoreError."""
        with self._state:
            if self._mapping is not None:
                return self._mapping
            if self._clock() < self._retry_at_s:
                return None
            memory, layout = self.memory, self.memory.layout
            fields = {
                "frame_bytes": layout.frame_bytes, "pages": layout.pages,
                "device": memory.identity[0], "inode": memory.identity[1],
            }
            try:
                limit = min(deadline, self._clock() + _ATTACH_S)
                answer = self._client.call("PUT", self._path, fields, deadline=limit)
            except StoreError:
                self._retry_at_s = self._clock() + _REFUSED_S
                raise
            self._mapping = str(answer.get("mapping"))
            self._open_lock(self._client.access.lock)
            return self._mapping

    def forget(self, mapping: str) -> None:
        """Map the memory again at the next call: the daemon no longer knows this mapping."""
        with self._state:
            if self._mapping == mapping:
                self._mapping = None

    @contextlib.contextmanager
    def fenced(self, mapping: str) -> Iterator[None]:
        """Run a request that names `mapping`; leave the block only when the daemon can no longer access its frames."""
        try:
            yield
        except Refused:
            raise
        except BaseException:
            self.fence(mapping)
            raise

    def fence(self, mapping: str) -> None:
        """Wait until operations of the daemon with `mapping` no longer access a frame. See the module's docstring."""
        self.forget(mapping)
        backoff = Backoff(_FENCE_S_MIN, _FENCE_S_MAX)
        with self._fencing:
            while self._fenced != mapping and not self._is_daemon_dead():
                try:
                    self._ask_to_detach()
                    break
                except StoreError:
                    self._clock.sleep(backoff.next_s())
            self._fenced = mapping

    def detach(self) -> None:
        """Unmap the memory at the daemon. Blocks for moments; ignores errors, since a daemon also detects the end of
        this process. REQUIRES: no verb is in flight."""
        with self._state:
            if self._mapping is not None:
                with contextlib.suppress(StoreError):
                    self._ask_to_detach()
            self._mapping = None
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def _ask_to_detach(self) -> None:
        self._client.call("DELETE", f"{self._path}?timeout_s={_DETACH_S}", deadline=self._clock() + _DETACH_S)

    def _open_lock(self, path: Path | None) -> None:
        """Open the lock file of the daemon that has mapped the memory, or of its successor. Only after it has replied:
        if a restart replaces the directory, the file might be the predecessor's. REQUIRES: `_state` is held."""
        if path is None:
            return
        found = None
        with contextlib.suppress(OSError):  # then only a reply can end a fence
            found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        before, self._lock_file = self._lock_file, found
        if before is not None:
            os.close(before)

    def _is_daemon_dead(self) -> bool:
        with self._state:
            if self._lock_file is None:
                return False
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return False
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
            return True


def frame_runs(
    memories: Sequence[SharedFrames], pages: Sequence[PageBuffer], pages_max: int, breaks: Sequence[int] = ()
) -> Iterator[tuple[slice, SharedFrames | None, list[int]]]:
    """Cut the pages of a call into runs of frames of one memory, at most `pages_max`, and runs of other pages (None).
    A run does not reach over one of the positions in `breaks`. A frame that occurs twice in a call counts as another
    page: one request cannot move two pages through it."""
    by_memory, seen = {id(one.memory): one for one in memories}, set[tuple[int, int]]()
    start, run, numbers = 0, None, list[int]()
    for at, page in enumerate(pages):
        shared, number = None, 0
        found = None if isinstance(page, PageView) else find(page)
        if found is not None and (memory := by_memory.get(id(found[0]))) is not None:
            frame, rest = divmod(found[1], memory.memory.layout.frame_bytes)
            if not rest and page.nbytes == memory.memory.layout.frame_bytes and (id(memory), frame) not in seen:
                seen.add((id(memory), frame))
                shared, number = memory, frame
        if at > start and (shared is not run or at - start >= pages_max or at in breaks):
            yield slice(start, at), run, numbers
            start, numbers = at, []
        run = shared
        numbers.append(number)
    if pages:
        yield slice(start, len(pages)), run, numbers
