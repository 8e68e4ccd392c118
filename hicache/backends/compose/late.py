"""A part that may be missing when its composition is opened: it is opened as soon as it can be.

Locking design: `_inner` is set once, by the constructor or by the opening thread, under `_state`, and read without a
lock. `_state` guards `_closed` and `_memory`; it is not held while the part is opened or registers memory, so `close`
does not wait for a server.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import BackendError
from ...frame import FrameCodec
from ..base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage, register_memory
from ..calls import Calls, check_batch, check_keys

_log = logging.getLogger(__name__)

# A part that cannot be opened is tried again after 0.5, 1, 2 ... 30 s.
RETRY_S_MIN = 0.5
RETRY_S_MAX = 30.0
_NOT_OPEN = "not_open"


class LatePart(StorageBackend):
    """The backend that `open_part` opens; until it can be opened, a store where every call is an error.

    A Composite of that one backend. `open_part` is called in the constructor and then, until it raises no BackendError
    any more, in a thread. Memory that is to be registered is, before the first verb of a part that comes late. Raises
    what else `open_part` raises.
    """

    def __init__(self, codec: FrameCodec, name: str, open_part: Callable[[], StorageBackend]) -> None:
        super().__init__(codec)
        self._name = name
        self._open_part = open_part
        self._calls = Calls(codec)
        self._state = threading.Condition()
        self._closed = False
        self._inner: StorageBackend | None = None
        self._memory: list[memoryview] = []
        self._thread: threading.Thread | None = None
        if not self._try():
            self._thread = threading.Thread(target=self._keep_trying, name=f"hicache-open-{name}", daemon=True)
            self._thread.start()

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""
        return [] if self._inner is None else [self._inner]

    def _try(self) -> bool:
        try:
            opened = self._open_part()
            if not self._take_in(opened):
                opened.close()
        except BackendError as error:
            if self._thread is None:  # the first attempt; the others would only say it again
                _log.warning("storage part %s cannot be opened yet: %s", self._name, error)
            return False
        if self._thread is not None:
            _log.info("storage part %s is open now", self._name)
        return True

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

    def _keep_trying(self) -> None:
        pause_s = RETRY_S_MIN
        try:
            while not self._wait_closed(pause_s) and not self._try():
                pause_s = min(2 * pause_s, RETRY_S_MAX)
        except Exception:  # the thread ends, and with it the hope for this part; its calls go on failing visibly
            self._calls.count(errors=["internal"])
            _log.exception("opening storage part %s failed unexpectedly", self._name)

    def _wait_closed(self, timeout_s: float) -> bool:
        with self._state:
            return self._state.wait_for(lambda: self._closed, timeout_s)

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        if self._inner is not None:
            return self._inner.batch_exists(keys, deadline=deadline)
        check_keys(keys)
        self._calls.count(errors=[_NOT_OPEN])
        return 0

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        if self._inner is not None:
            return self._inner.batch_get(keys, frames, deadline=deadline)
        check_batch(self.codec, keys, frames)
        return self._calls.refuse_gets(len(keys), _NOT_OPEN)

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend."""
        if self._inner is not None:
            return self._inner.batch_set(keys, frames, parent=parent, deadline=deadline)
        check_batch(self.codec, keys, frames, parent)
        return self._calls.refuse_sets(len(keys), _NOT_OPEN)

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        if self._inner is not None:
            return self._inner.delete(keys, deadline=deadline)
        check_keys(keys)
        self._calls.count(errors=[_NOT_OPEN])
        return 0

    def usage(self) -> Usage:
        """See StorageBackend. Nothing, as long as the part is not open."""
        if self._inner is not None:
            return self._inner.usage()
        self._calls.count(errors=[_NOT_OPEN])
        return Usage(0, 0, None)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. The part's own, and what was asked before it was open: `errors["not_open"]`."""
        own = self._calls.statistics()
        if self._inner is None:
            return own
        found = self._inner.statistics()
        return replace(
            found,
            gets=dict(Counter(own.gets) + Counter(found.gets)),
            sets=dict(Counter(own.sets) + Counter(found.sets)),
            errors=dict(Counter(own.errors) + Counter(found.errors)),
        )

    def close(self) -> None:
        """See StorageBackend. An attempt to open that is under way closes what it still opens."""
        with self._state:
            self._closed = True
            self._memory.clear()
            self._state.notify_all()
        if self._inner is not None:
            self._inner.close()
