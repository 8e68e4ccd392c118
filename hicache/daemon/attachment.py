"""Attachment: the storage of a node's namespaces, and the operators' overrides of it.

All namespaces use the same: the configured storage, one store of it, or none (only the pool). A background thread
applies a change to one namespace after the other; a store that cannot be opened is tried again, and until then its
namespace has no store.

Locking design: `_lock` guards the wanted state and `_applied`, and is not held for blocking calls. The background
thread replaces stores; `joined` handles a namespace that is opened at the same time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from ..backends.base import StorageBackend
from ..backends.guard import Direction, Override, Overrides
from ..backends.opening import StorageOpener
from ..backends.registry import BackendSpec
from ..background import BackgroundTask
from ..backoff import Backoff
from ..errors import BackendError, ConfigError
from ..frame import FrameCodec
from .namespace import Namespace

logger = logging.getLogger(__name__)

# As for a store inside an engine: an attempt is repeated after 0.1, 0.2 ... 30 s, and one that takes longer than a
# minute hangs.
_REOPEN_S_MIN = 0.1
_REOPEN_S_MAX = 30.0
_PATIENCE_S = 60.0
# The number of remembered namespaces at which closed ones are forgotten.
_APPLIED_MAX = 4096


class Attachment:
    """See the module's docstring. `namespaces` returns the open ones. `opener` may be replaced by another one with the
    same stores."""

    def __init__(self, opener: StorageOpener, namespaces: Callable[[], Sequence[Namespace]]) -> None:
        self.opener = opener
        self.is_attached = opener.spec is not None
        self.overrides = Overrides()
        self._namespaces = namespaces
        self._lock = threading.Lock()
        self._part: BackendSpec | None = None
        self._wanted = 0
        self._applied: dict[str, int] = {}  # by the digest of a namespace
        self._backoff = Backoff(_REOPEN_S_MIN, _REOPEN_S_MAX)
        self._task = BackgroundTask("attach", self._catch_up, _PATIENCE_S, backoff=self._backoff)

    # For the node

    def open(self, codec: FrameCodec) -> StorageBackend | None:
        """Open the store of a new namespace; None without storage. Blocks and raises as `StorageOpener.open`."""
        with self._lock:
            if len(self._applied) >= _APPLIED_MAX:
                there = {namespace.digest for namespace in self._namespaces()}
                self._applied = {digest: number for digest, number in self._applied.items() if digest in there}
            self._applied[codec.namespace.hex()] = self._wanted
            is_attached, part = self.is_attached, self._part
        return self._open(codec, part) if is_attached else None

    def joined(self, namespace: Namespace) -> None:
        """Register an open namespace, and apply changes since `open`."""
        with self._lock:
            is_late = self._applied.get(namespace.digest) != self._wanted
        if is_late:
            self._task.wake()

    def close(self, timeout_s: float) -> None:
        """End the thread; blocks."""
        self._task.close(timeout_s)

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
            open_stores = [part for namespace in self._namespaces() for part in namespace.store.parts]
            self.overrides.force(direction, mode, store, open_stores)

    def _change(self, is_attached: bool, part: BackendSpec | None) -> None:
        with self._lock:
            self.is_attached, self._part = is_attached, part
            self._wanted += 1
        self._backoff.reset()
        self._task.wake()

    # In the background

    def _catch_up(self) -> float:
        failed = False
        for namespace in self._namespaces():
            try:
                self._replace(namespace)
            except (BackendError, ConfigError) as error:
                failed = True
                logger.warning("namespace %s: its store cannot be opened: %s", namespace.digest[:8], error)
        if failed:
            return time.monotonic() + self._backoff.next_s()
        self._backoff.reset()
        return math.inf

    def _replace(self, namespace: Namespace) -> None:
        store = namespace.store
        with self._lock:
            wanted, is_attached, part = self._wanted, self.is_attached, self._part
        if self._is_applied(namespace, wanted):
            return
        _close(store.replace(None))  # waits for the calls in flight; another thread may have applied the change since
        if self._is_applied(namespace, wanted):
            return
        _close(store.replace(self._open(store.codec, part) if is_attached else None))
        with self._lock:
            self._applied[namespace.digest] = wanted
        if namespace not in self._namespaces():  # it was closed at the same time, without closing this store
            _close(store.replace(None))

    def _is_applied(self, namespace: Namespace, wanted: int) -> bool:
        with self._lock:
            return self._applied.get(namespace.digest) == wanted

    def _open(self, codec: FrameCodec, part: BackendSpec | None) -> StorageBackend:
        opened = self.opener.open(codec, part)
        self.overrides.apply(opened)
        return opened


def _close(store: StorageBackend | None) -> None:
    try:
        if store is not None:
            store.close()
    except BackendError as error:
        logger.warning("a detached store failed to close: %s", error)
