"""A part that may be missing when its composition is opened: it is opened as soon as it can be.

Locking design: `_inner` is set once, by the constructor or by `_opening`, under `_state`, and read without a lock.
`_state` guards `_closed` and `_memory`; it is not held while the part is opened or registers memory, so `close` does
not wait for a server. Otherwise as `envelope`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from ...background import BackgroundTask
from ...backoff import Backoff
from ...errors import BackendError
from ...frame import FrameCodec
from ..base import StorageBackend, Usage, register_memory
from ..envelope import Wrapper
from ..errors import StoreError

_log = logging.getLogger(__name__)

# A part that cannot be opened is tried again after 0.5, 1, 2 ... 30 s.
RETRY_S_MIN = 0.5
RETRY_S_MAX = 30.0
_NOT_OPEN = "not_open"


class LatePart(Wrapper):
    """The backend that `open_part` opens; until it can be opened, a store where every call is an error.

    A Composite of that one backend. `open_part` is called in the constructor and then, until it raises no BackendError
    any more, in a BackgroundTask. Memory that is to be registered is, before the first verb of a part that comes late.
    Raises what else `open_part` raises; later that is counted, and the part is tried again.
    """

    def __init__(self, codec: FrameCodec, name: str, open_part: Callable[[], StorageBackend]) -> None:
        super().__init__(codec)
        self._name = name
        self._open_part = open_part
        self._state = threading.Lock()
        self._closed = False
        self._inner: StorageBackend | None = None
        self._memory: list[memoryview] = []
        self._backoff = Backoff(RETRY_S_MIN, RETRY_S_MAX)
        self._opening = BackgroundTask(
            f"open-{name}", self._try_late, backoff=self._backoff,
            on_error=lambda: self.count("internal"),
        )  # fmt: skip
        try:
            self._open()
        except BackendError as error:
            _log.warning("storage part %s cannot be opened yet: %s", name, error)
            self._opening.wake(time.monotonic() + self._backoff.next_s())

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""
        return [] if self._inner is None else [self._inner]

    def _open(self) -> None:
        opened = self._open_part()
        if not self._take_in(opened):
            opened.close()

    def _try_late(self) -> float:
        try:
            self._open()
        except BackendError:  # a log line would only say again what the first one said
            return time.monotonic() + self._backoff.next_s()
        _log.info("storage part %s is open now", self._name)
        return math.inf

    def _take_in(self, opened: StorageBackend) -> bool:
        """Use a part from now on, with all memory registered; False if nobody wants it any more."""
        registered = 0
        try:
            while True:
                with self._state:
                    if self._closed:
                        return False
                    memory = self._memory[registered:]
                    if not memory:
                        self._inner = opened
                        return True
                for piece in memory:
                    register_memory(opened, piece)
                registered += len(memory)
        except BaseException:
            opened.close()
            raise

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration. Keeps `memory` for a part that is not open yet."""
        with self._state:
            self._memory.append(memory)
            inner = self._inner
        if inner is not None:
            register_memory(inner, memory)

    def reach(self, pages: int, deadline: float) -> StorageBackend:
        """See Wrapper."""
        if self._inner is None:
            self._opening.tend()
            raise StoreError(_NOT_OPEN)
        return self._inner

    def measure(self) -> Usage:
        """See Envelope. Nothing, as long as the part is not open."""
        return self.reach(0, 0.0).usage()

    def close(self) -> None:
        """See StorageBackend. An attempt to open that is under way closes what it still opens."""
        with self._state:
            self._closed = True
            self._memory.clear()
        self._opening.close(timeout_s=0.0)
        super().close()

    def shut(self) -> None:
        """See Envelope."""
        if self._inner is not None:
            self._inner.close()
