"""What a backend holds of a store: a client, staging memory, threads; and how it gets new ones.

A daemon that was started anew does not know its clients' memory any more, and the library does not notice if a call was
made meanwhile. Then every transfer is refused, and only a new client with new memory helps.

Locking design: `Links._state` guards the current link, how many verbs use each link, and whether a new one is being
made; it is held for a few instructions. A new link is made by a BackgroundTask, and links are left on the threads of a
SupervisedPool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from ...background import BackgroundTask
from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendError, ConfigError
from ...frame import FrameCodec
from ...supervised import SupervisedPool
from .batches import Names, Parts
from .client import join_store, library_pool
from .lanes import Roads
from .staging import Staging

_log = logging.getLogger(__name__)

# A new link that does not help is not replaced at once: each costs threads, memory and a second to leave.
RENEW_EVERY_S = 5.0
# Links that may hang at once while they are left.
_LEAVING_MAX = 4


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
        self._unfit: Link | None = None  # the link that is to be replaced
        self._renew_from = -math.inf  # monotonic
        self._closed = False
        self._renewal = BackgroundTask("mooncake-renew", self._renew, linger_s=0.0)
        self._leaving = SupervisedPool[Link](
            "mooncake-leave", _LEAVING_MAX, handle=lambda link, beat: link.leave(), linger_s=0.0
        )

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
                self._leaving.submit(link)

    def renew(self, link: Link) -> None:
        """Replace `link`, unless that is done or was tried in the last `RENEW_EVERY_S`. Does not block; the verbs
        meanwhile use the old one."""
        with self._state:
            now = time.monotonic()
            if link is not self._current or now < self._renew_from or self._closed:
                return
            self._renew_from = now + RENEW_EVERY_S
            self._unfit = link
        self._renewal.wake()

    def _renew(self) -> float:
        old = self._unfit
        if old is None or old is not self._current:
            return math.inf
        old.forget_client()
        try:
            new = self._make()
            _log.warning("mooncake store: joined the daemon anew; it had lost this process's memory")
        except (BackendError, ConfigError) as error:
            _log.warning("mooncake store: the daemon could not be joined anew (%s); trying again", type(error).__name__)
            return math.inf
        with self._state:
            unwanted = new if self._closed else old
            if not self._closed:
                self._current = new
            unwanted.retired = True
            unused = not unwanted.users
        if unused:
            unwanted.leave()
        return math.inf

    def close(self, timeout_s: float) -> bool:
        """Leave the store. False if a library call still hangs after `timeout_s`; the rest is done when it returns.

        REQUIRES: no verb is under way, and none follows.
        """
        with self._state:
            self._closed = True
        self._renewal.close(timeout_s=0.0)
        self._leaving.submit(self._current)
        return self._leaving.close(timeout_s)
