"""What a backend holds of a store: a client, staging memory, threads; and how it gets new ones.

A daemon that was started anew does not know its clients' memory any more, and the library does not notice if a call was
made meanwhile. Then every transfer is refused, and only a new client with new memory helps.

Locking design: `Links._state` guards the current link, how many verbs use each link, and whether a new one is being
made; it is held for a few instructions. A link is made, and left, on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendError, ConfigError
from ...frame import FrameCodec
from .batches import Names, Parts
from .client import join_store, library_pool
from .lanes import Roads
from .staging import Staging

_log = logging.getLogger(__name__)

_THREADS = "hicache-mooncake"
# A new link that does not help is not replaced at once: each costs threads, memory and a second to leave.
RENEW_EVERY_S = 5.0


class Link:
    """One membership in a store. Raises ConfigError if the library is missing, BackendUnavailable if the store cannot
    be joined, BackendError without memory for staging."""

    def __init__(self, codec: FrameCodec, options: MooncakeStorageOptions) -> None:
        self.users = 0
        self.retired = False
        self._pool = library_pool("mooncake")
        try:
            self._client = join_store(options, self._pool)
        except (BackendError, ConfigError):
            self._pool.close(timeout_s=1.0)
            raise
        try:
            self.staging = Staging(self._client, codec.frame_bytes, options.staging)
        except BackendError:
            self._client.leave()
            self._pool.close()
            raise
        names = Names(options.prefix, codec.namespace)
        self.parts = Parts(codec, names, self._client, Roads(self.staging, self._pool), self._pool)

    def register(self, address: int, size: int) -> None:
        """Let frames in this memory go as they lie. Raises BackendError."""
        self._client.register(address, size)
        self.parts.roads.add(address, address + size)

    def forget_client(self) -> None:
        """Have the next link made with another client."""
        self._client.forget()

    def leave(self) -> None:
        """Give everything back, when the last library call has ended. REQUIRES: no verb uses it."""
        self._pool.close()
        self.staging.free()
        for start, end in self.parts.roads.registered:
            self._client.unregister(start, end - start)
        self._client.leave()


class Links:
    """The link that verbs use now. `make` makes another."""

    def __init__(self, make: Callable[[], Link]) -> None:
        self._make = make
        self._state = threading.Lock()
        self._current = make()
        self._renewal: threading.Thread | None = None
        self._renew_from = -math.inf  # monotonic
        self._closed = False

    @property
    def current(self) -> Link:
        """The link that the next verb uses."""
        return self._current

    @contextlib.contextmanager
    def use(self) -> Iterator[Link]:
        """The current link, which stays until the block ends."""
        with self._state:
            link = self._current
            link.users += 1
        try:
            yield link
        finally:
            with self._state:
                link.users -= 1
                unused = link.retired and not link.users
            if unused:
                _leave(link)

    def renew(self, link: Link) -> None:
        """Replace `link`, unless that is done, under way or was tried in the last `RENEW_EVERY_S`. Does not block; the
        verbs meanwhile use the old one."""
        with self._state:
            if link is not self._current or self._renewal is not None or self._closed:
                return
            now = time.monotonic()
            if now < self._renew_from:
                return
            self._renew_from = now + RENEW_EVERY_S
            self._renewal = threading.Thread(target=self._renew, args=(link,), name=f"{_THREADS}-renew", daemon=True)
            self._renewal.start()

    def _renew(self, old: Link) -> None:
        old.forget_client()
        new: Link | None = None
        try:
            new = self._make()
            _log.warning("mooncake store: joined the daemon anew; it had lost this process's memory")
        except (BackendError, ConfigError) as error:
            _log.warning("mooncake store: the daemon could not be joined anew (%s); trying again", type(error).__name__)
        with self._state:
            self._renewal = None
            if new is None:
                return
            unwanted = new if self._closed else old
            if not self._closed:
                self._current = new
            unwanted.retired = True
            unused = not unwanted.users
        if unused:
            _leave(unwanted)

    def close(self, timeout_s: float) -> bool:
        """Leave the store. False if a library call still hangs after `timeout_s`; the rest is done when it returns.

        REQUIRES: no verb is under way, and none follows.
        """
        with self._state:
            self._closed = True
        leaving = _leave(self._current)
        leaving.join(timeout_s)
        return not leaving.is_alive()


def _leave(link: Link) -> threading.Thread:
    thread = threading.Thread(target=link.leave, name=f"{_THREADS}-leave", daemon=True)
    thread.start()
    return thread
