"""Attachment: the storage of a node's namespaces, and the operators' overrides of it.

All namespaces that are not retired have the same: the configured storage, one store of it, or none (only the pool).
Each namespace has a background thread, which opens and closes its store; nothing else opens stores. An attempt that
fails is repeated, and until it succeeds the namespace works without a store.

Locking design: `_lock` of the attachment guards the wanted state and the table of openings; `_state` of an opening
guards its fields. Neither is held for blocking calls, and no lock is taken while `_state` is held. The thread of an
opening replaces the store of its namespace.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from ..backends.base import StorageBackend
from ..backends.guard import Direction, Override, Overrides
from ..backends.opening import StorageOpener
from ..backends.registry import BackendSpec
from ..background import BackgroundTask
from ..backoff import Backoff
from ..errors import BackendError, ConfigError
from ..frame import FrameCodec
from ..logs import LimitedLog
from .namespace import Namespace
from .statistics import OpeningStatistics

logger = logging.getLogger(__name__)

# As for a store inside an engine: an attempt is repeated after 0.1, 0.2 ... 30 s, and one that takes longer than a
# minute hangs.
_REOPEN_S_MIN = 0.1
_REOPEN_S_MAX = 30.0
_PATIENCE_S = 60.0
# A namespace's line about a store that cannot be opened is written at most once per this time.
_LOG_S = 60.0
# The longest shown reason: a message of any backend fits, and a page with many namespaces stays small.
_REASON_CHARS_MAX = 300


class Attachment:
    """See the module's docstring. `opener` may be replaced by another one with the same stores."""

    def __init__(self, opener: StorageOpener) -> None:
        self.opener = opener
        self.is_attached = opener.spec is not None
        self.overrides = Overrides()
        self._lock = threading.Lock()
        self._part: BackendSpec | None = None
        self._openings: dict[str, _Opening] = {}  # by the digest of a namespace
        self._log = LimitedLog(logger, _LOG_S)

    # For the node

    def joined(self, namespace: Namespace) -> None:
        """Open the store of a new namespace in the background, and apply later changes to it. Does not block."""
        opening = _Opening(self, namespace, self._log)
        with self._lock:
            self._openings[namespace.digest] = opening
        opening.change()

    def changed(self, namespace: Namespace) -> None:
        """Close the store of a namespace that is retired now, or open that of one that is used again. Does not block.
        """
        opening = self._openings.get(namespace.digest)
        if opening is not None:
            opening.change()

    def wait(self, namespace: Namespace, deadline: float) -> None:
        """Wait until the first attempt to open the store of a namespace has ended, at most until `deadline`, so that
        calls find a healthy store."""
        opening = self._openings.get(namespace.digest)
        if opening is not None:
            opening.wait(deadline)

    def left(self, namespace: Namespace) -> None:
        """Stop opening stores of a namespace that is being closed. Does not block."""
        with self._lock:
            opening = self._openings.pop(namespace.digest, None)
        if opening is not None:
            opening.close(0.0)

    def statistics(self, namespace: Namespace) -> OpeningStatistics | None:
        """Return why the wanted store of a namespace is not open; None if it is, or none is wanted. Does not block."""
        opening = self._openings.get(namespace.digest)
        return None if opening is None else opening.statistics()

    def close(self, timeout_s: float) -> None:
        """End the threads; blocks."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            openings, self._openings = self._openings, {}
        for opening in openings.values():
            opening.close(max(0.0, deadline - time.monotonic()))

    # For operators

    def attach(self, part: BackendSpec | None) -> None:
        """Use the configured storage, or only `part` of it. Does not block."""
        self._change(True, part)

    def detach(self) -> None:
        """Stop using storage. The stores are closed after their last call. Does not block."""
        self._change(False, None)

    def force(self, direction: Direction, mode: Override, store: str | None) -> None:
        """Force breakers, see Overrides. Does not block."""
        with self._lock:
            open_stores = [part for opening in self._openings.values() for part in opening.namespace.store.parts]
            self.overrides.force(direction, mode, store, open_stores)

    def _change(self, is_attached: bool, part: BackendSpec | None) -> None:
        with self._lock:
            self.is_attached, self._part = is_attached, part
            openings = list(self._openings.values())
        for opening in openings:
            opening.change()

    # For an opening

    def open(self, codec: FrameCodec) -> StorageBackend:
        """Open the wanted store. Blocks and raises as `StorageOpener.open`."""
        opened = self.opener.open(codec, self._part)
        self.overrides.apply(opened)
        return opened


class _Opening:
    """The store of one namespace: opened, replaced and opened again on a background thread."""

    def __init__(self, attachment: Attachment, namespace: Namespace, log: LimitedLog) -> None:
        self.namespace = namespace
        self._attachment = attachment
        self._log = log
        self._state = threading.Condition()
        self._wanted = self._tried = self._applied = 0  # numbers of changes
        self._is_closed = False
        self._failed: OpeningStatistics | None = None
        self._backoff = Backoff(_REOPEN_S_MIN, _REOPEN_S_MAX)
        self._task = BackgroundTask("open", self._attempt, _PATIENCE_S, backoff=self._backoff)

    def change(self) -> None:
        """Apply the wanted state of attachment and namespace now. Does not block."""
        with self._state:
            self._wanted += 1
            self.namespace.store.is_awaited = self._is_wanted
        self._backoff.reset()
        self._task.wake()

    def wait(self, deadline: float) -> None:
        """Wait until the latest change was tried, at most until `deadline`."""
        with self._state:
            self._state.wait_for(lambda: self._tried == self._wanted, max(0.0, deadline - time.monotonic()))

    def statistics(self) -> OpeningStatistics | None:
        """Return the failed attempts, None if the last one succeeded. Does not block."""
        return self._failed

    def close(self, timeout_s: float) -> None:
        """End the thread. A store that is opened later is closed at once. Blocks."""
        with self._state:
            self._is_closed = True
        self._task.close(timeout_s)

    def _attempt(self) -> float:
        with self._state:
            number = self._wanted
        reason = "an unexpected error, which is in the log"
        try:
            self._apply(number)
            reason = ""
        except (BackendError, ConfigError) as error:
            reason = " ".join(str(error).split())
            place = self.namespace.digest[:8]
            self._log.warn(place, "namespace %s: its store cannot be opened, so it works without it and tries again: "
                           "%s", place, error)  # fmt: skip
        finally:
            self._note(number, reason)
        if reason:
            return time.monotonic() + self._backoff.next_s()
        self._backoff.reset()
        return math.inf

    def _apply(self, number: int) -> None:
        store = self.namespace.store
        if self._is_stale(number):
            return
        _close(store.replace(None))  # waits for the calls in flight
        store.is_awaited = self._is_wanted
        if store.is_awaited:
            opened = self._attachment.open(store.codec)
            if self._is_stale(number):  # the store is not wanted any longer, or another thread opened it faster
                _close(opened)
                return
            _close(store.replace(opened))
            store.is_awaited = False
        if self._is_closed:  # at the same time, maybe without closing this store
            _close(store.replace(None))

    @property
    def _is_wanted(self) -> bool:
        return self._attachment.is_attached and not self.namespace.is_retired

    def _is_stale(self, number: int) -> bool:
        with self._state:
            return self._is_closed or number == self._applied or number != self._wanted

    def _note(self, number: int, reason: str) -> None:
        with self._state:
            before, self._failed = self._failed, None
            if reason:
                attempts, since_s = (0, time.time()) if before is None else (before.attempts, before.since_s)
                self._failed = OpeningStatistics(attempts + 1, since_s, reason[:_REASON_CHARS_MAX])
            elif number == self._wanted:
                self._applied = number
            self._tried = max(self._tried, number)
            self._state.notify_all()


def _close(store: StorageBackend | None) -> None:
    try:
        if store is not None:
            store.close()
    except BackendError as error:
        logger.warning("a detached store failed to close: %s", error)
