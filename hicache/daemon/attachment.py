"""Attachment: which storage the namespaces of a node have, and the operators' overrides of it.

All namespaces that are not retired have the same: the configured storage, one store of it, or none (only the pool).
Each has its own slot, so a store that hangs while it is opened does not block other namespaces. Until its store is
open, a namespace works without it.

Locking design: `_lock` guards the wanted state and the table of namespaces. It is taken before the lock of a slot, so
that the last change of the wanted state is the last change of each slot. One thread calls `advance` of all slots.
"""

from __future__ import annotations

import logging
import math
import threading

from ..backends.base import Direction
from ..backends.guard import Override
from ..backends.opening import StorageOpener
from ..backends.registry import BackendSpec
from ..backends.slot import OPEN_LOG_S, Overrides
from ..background import BackgroundTask
from ..clock import SYSTEM_CLOCK, Clock
from ..frame import FrameCodec
from ..logs import LimitedLog
from .namespace import ServedNamespace
from .shared_slot import SharedSlot

logger = logging.getLogger(__name__)


class Attachment:
    """See the module's docstring. `opener` may be replaced by another one with the same stores."""

    def __init__(self, opener: StorageOpener, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.opener = opener
        self.is_attached = opener.spec is not None
        self.overrides = Overrides()
        self._lock = threading.Lock()
        self._part: BackendSpec | None = None
        self._namespaces: dict[str, ServedNamespace] = {}  # by digest
        self._log = LimitedLog(logger, OPEN_LOG_S, clock)
        self._task = BackgroundTask("reopen", self._advance, clock=clock)

    # For the node

    def slot(self, codec: FrameCodec) -> SharedSlot:
        """Return the slot of a new namespace."""
        return SharedSlot(codec, overrides=self.overrides, log=self._log, changed=self._task.wake, clock=self._clock)

    def joined(self, namespace: ServedNamespace) -> None:
        """Open the store of a new namespace in the background, and apply later changes to it. Does not block."""
        with self._lock:
            self._namespaces[namespace.digest] = namespace
            self._replace(namespace)

    def changed(self, namespace: ServedNamespace) -> None:
        """Close the store of a namespace that is retired now, or open that of one in use again. Does not block."""
        with self._lock:
            self._replace(namespace)

    def left(self, namespace: ServedNamespace) -> None:
        """Leave alone the store of a namespace that is being closed. Does not block."""
        with self._lock:
            self._namespaces.pop(namespace.digest, None)

    def close(self, timeout_s: float) -> None:
        """End the threads; blocks."""
        deadline = self._clock() + timeout_s
        with self._lock:
            namespaces, self._namespaces = self._namespaces, {}
        self._task.close(timeout_s)
        for namespace in namespaces.values():
            namespace.store.slot.end(max(0.0, deadline - self._clock()))

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
            slots = [namespace.store.slot for namespace in self._namespaces.values()]
        self.overrides.force(direction, mode, store, (one for slot in slots for one in slot.open_backends()))

    def _change(self, is_attached: bool, part: BackendSpec | None) -> None:
        with self._lock:
            self.is_attached, self._part = is_attached, part
            for namespace in self._namespaces.values():
                self._replace(namespace)

    def _replace(self, namespace: ServedNamespace) -> None:
        is_wanted, codec, part = self.is_attached and not namespace.is_retired, namespace.store.codec, self._part
        namespace.store.slot.replace((lambda: self.opener.open(codec, part)) if is_wanted else None)

    def _advance(self) -> float:
        with self._lock:
            slots = [namespace.store.slot for namespace in self._namespaces.values()]
        return min((slot.advance() for slot in slots), default=math.inf)
